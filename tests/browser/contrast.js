// Text that stands out from its ground by less than arguments[0], as [ratio, text, colour, ground]. Computed styles of
// every text node that is drawn; the ground of text in a drawing is the shape under its middle.
var least = arguments[0];

function parse(color) {
  var parts = color.match(/[\d.]+/g).map(Number);
  return { rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1 };
}

function luminance(rgb) {
  var linear = rgb.map(function (part) {
    var share = part / 255;
    return share <= 0.04045 ? share / 12.92 : Math.pow((share + 0.055) / 1.055, 2.4);
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function ratio(one, other) {
  var pair = [luminance(one), luminance(other)].sort(function (a, b) { return b - a; });
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}

function behind(element) {
  for (var at = element; at; at = at.parentElement) {
    var ground = parse(getComputedStyle(at).backgroundColor);
    if (ground.alpha === 1) { return ground.rgb; }
  }
  return [255, 255, 255];
}

function under(text, box) {
  var stack = document.elementsFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  for (var i = 0; i < stack.length; i++) {
    var shape = stack[i];
    if (!(shape instanceof SVGGeometryElement) || shape === text) { continue; }
    var style = getComputedStyle(shape);
    if (style.fill !== "none") { return parse(style.fill).rgb; }
  }
  return behind(text.ownerSVGElement.parentElement);
}

var found = [], seen = 0, node;
var walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while ((node = walker.nextNode())) {
  var element = node.parentElement, words = node.textContent.trim();
  var box = element.getBoundingClientRect();
  if (!words || !element.checkVisibility({ visibilityProperty: true }) || box.width < 2 || box.height < 2) { continue; }
  if (/^(SCRIPT|STYLE)$/.test(element.tagName)) { continue; }
  var drawn = element instanceof SVGElement, style = getComputedStyle(element);
  var ink = parse(drawn ? style.fill : style.color), ground = drawn ? under(element, box) : behind(element);
  seen += 1;
  var stands = ratio(ink.rgb, ground);
  if (stands < least || ink.alpha < 1) {
    found.push([Math.round(stands * 100) / 100, words.slice(0, 40), ink.rgb.join(), ground.join()]);
  }
}
return [seen, found];
