document.querySelectorAll("button.copy").forEach(function (button) {
  button.addEventListener("click", function () {
    var code = button.closest(".flags").querySelector("code");
    function done(word) {
      var label = button.firstElementChild;
      label.textContent = word;
      setTimeout(function () { label.textContent = "Copy"; }, 1600);
    }
    function select() {
      var range = document.createRange();
      range.selectNodeContents(code);
      var selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      done(document.execCommand("copy") ? "Copied" : "Selected");
    }
    if (navigator.clipboard) {
      navigator.clipboard.writeText(code.textContent).then(function () { done("Copied"); }, select);
    } else {
      select();
    }
  });
});
