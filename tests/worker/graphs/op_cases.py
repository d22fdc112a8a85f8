"""Kinds of operations a recording must get right: each a small function of static inputs that returns its results."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Results = torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]


class Inputs:
    """Static tensors at fixed addresses. ``fill`` writes the values of a seed; indices stay legal under every seed."""

    def __init__(self, seed: int = 0) -> None:
        self.x = torch.empty(4, 6)
        self.y = torch.empty(4, 6)
        self.w = torch.empty(8, 6)
        self.b = torch.empty(8)
        self.image = torch.empty(2, 3, 8, 8)
        self.kernel = torch.empty(5, 3, 3, 3)
        self.q = torch.empty(2, 4, 5, 8)
        self.k = torch.empty(2, 4, 7, 8)
        self.v = torch.empty(2, 4, 7, 8)
        self.half = torch.empty(4, 6, dtype=torch.bfloat16)
        self.z = torch.empty(4, 6, dtype=torch.complex64)
        self.ids = torch.empty(4, dtype=torch.int64)
        self.small = torch.empty(4, dtype=torch.int32)
        self.rows = torch.empty(4, dtype=torch.int64)
        self.mask = torch.empty(4, 6, dtype=torch.bool)
        self.table = torch.empty(10, 6)
        self.state = torch.empty(10, 6)
        self.count = torch.empty(3, dtype=torch.int64)
        self.scalar = torch.empty(())
        self.none = torch.empty(0, 6)
        self.fill(seed)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(vars(self))

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for name, tensor in self.tensors().items():
                if name == "rows":
                    tensor.copy_(torch.randperm(10, generator=generator)[:4])
                elif tensor.dtype == torch.bool:
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
                elif tensor.is_floating_point() or tensor.is_complex():
                    tensor.normal_(generator=generator)
                else:
                    tensor.random_(0, 6, generator=generator)


Case = Callable[[Inputs], Results]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


CASES |= {
    "add": lambda i: i.x + i.y,
    "chain": lambda i: ((i.x * 2 + i.y).tanh() - 1.5).relu().exp(),
    "unary_not_generated": lambda i: (i.x.gelu() if hasattr(i.x, "gelu") else F.gelu(i.x), F.relu(i.x), i.x.sign()),
    "scalar_tensor_operand": lambda i: i.x * i.scalar,
    "promotion_int_float": lambda i: i.x * i.small.unsqueeze(1),
    "promotion_half_float": lambda i: i.half + i.x,
    "promotion_int_division": lambda i: i.small / 3,
    "half_matmul": lambda i: i.half @ i.half.t(),
    "cast": lambda i: (i.x.to(torch.bfloat16), i.ids.float(), i.x.double(), i.x.to(torch.float32)),
    "comparison": lambda i: ((i.x > i.y), (i.ids == i.small), (i.ids >= 3)),
    "where": lambda i: (torch.where(i.mask, i.x, i.y), torch.where(i.mask, i.x, 0.0)),
    "clamp": lambda i: i.x.clamp(-0.5, 0.5) + i.x.clamp_min(i.y),
    "linear": lambda i: F.linear(i.x, i.w),
    "linear_bias": lambda i: F.linear(i.x, i.w, i.b),
    "linear_batched": lambda i: F.linear(i.q, i.q[0, 0], i.q[0, 0, :, 0]),
    "matmul_broadcast": lambda i: i.q @ i.k.transpose(-1, -2),
    "bmm": lambda i: torch.bmm(i.q[0], i.k[0].transpose(1, 2)),
    "baddbmm": lambda i: torch.baddbmm(i.x[0, 0], i.q[0], i.k[0].transpose(1, 2), beta=0.5, alpha=2.0),
    "einsum": lambda i: torch.einsum("bhqd,bhkd->bhqk", i.q, i.k),
    "convolution": lambda i: F.conv2d(i.image, i.kernel, padding=1),
    "pooling": lambda i: F.max_pool2d(i.image, 2),
    "transpose_then_compute": lambda i: i.x.t() * 2,
    "clone_keeps_strides": lambda i: i.x.t().clone() + i.x.t(),
    "contiguous": lambda i: i.x.t().contiguous().view(-1),
    "reshape_that_copies": lambda i: i.x.t().reshape(-1) + 1,
    "reshape_that_views": lambda i: (i.x + 1).reshape(2, -1) * 2,
    "unsafe_view": lambda i: torch.ops.aten._unsafe_view(i.x + 1, [24]) * 2,
    "expand_stride_0": lambda i: i.b.expand(3, 8) + i.b[:1].expand(8),
    "expand_of_new": lambda i: (i.b + 1).expand(3, 8).sum(0),
    "as_strided": lambda i: (i.x + 0).as_strided((3, 2), (2, 1), 1) * 2,
    "slices": lambda i: torch.cat([i.x[1:3, ::2], i.x[:2, 1::2]]) + i.x[-1, 0],
    "flip_roll": lambda i: i.x.flip(0) + i.x.roll(1, 1),
    "view_dtype": lambda i: (i.x + 1).view(torch.int32).bitwise_and(0x7FFFFFFF).view(torch.float32),
    "unfold": lambda i: (i.x + 1).unfold(1, 3, 1).sum(-1),
    "split_unbind": lambda i: [a * 2 for a in (i.x + 1).split(2)] + [a - 1 for a in i.y.unbind(1)],
    "chunk_of_projection": lambda i: tuple(part + 1 for part in F.linear(i.x, i.w).chunk(2, -1)),
    "movedim_flatten": lambda i: (i.q * 1).movedim(1, 2).flatten(2),
    "stack_cat": lambda i: torch.cat([torch.stack([i.x, i.y]), (i.x - i.y)[None]]),
    "pad": lambda i: F.pad(i.x, (1, 2), value=3.0) + F.pad(i.x, (1, 2)),
    "tril_outer": lambda i: torch.outer(i.b, i.b).tril(),
    "sums": lambda i: (i.x.sum(), i.x.sum(0), i.x.mean(-1, keepdim=True), i.half.sum(1), i.ids.sum()),
    "softmax": lambda i: (i.x.softmax(-1), i.x.log_softmax(0), i.half.softmax(-1, dtype=torch.float32)),
    "norms": lambda i: (F.layer_norm(i.x, (6,)), F.rms_norm(i.x, (6,), i.w[0]), F.group_norm(i.image[:, :2], 2)),
    "batch_norm_eval": lambda i: F.batch_norm(i.image, i.b[:3], i.b[3:6].exp(), training=False),
    "cumsum": lambda i: (i.x.cumsum(1), i.small.cumsum(0)),
    "multi_output": lambda i: (*i.x.max(1), *i.x.topk(2), *i.x.sort(0, descending=True), i.x.argmax(1)),
    "variance": lambda i: (*torch.var_mean(i.x, 1), i.x.std()),
    "aminmax": lambda i: torch.aminmax(i.x, dim=0),
    "embedding": lambda i: F.embedding(i.ids, i.table),
    "index_int": lambda i: (i.table[i.ids], i.table[i.ids, i.small.long()], i.table[:, i.ids]),
    "index_int32": lambda i: i.table[i.small],
    "index_select_gather": lambda i: (i.table.index_select(0, i.ids), i.table.gather(0, i.ids[:, None].expand(4, 6))),
    "take_along": lambda i: torch.take_along_dim(i.x, i.y.argsort(1), 1),
    "one_hot_by_comparison": lambda i: (i.ids[:, None] == torch.arange(6)).float(),
    "arange_factories": lambda i: torch.arange(6) * i.ids.sum() + torch.ones(6) + torch.full((6,), 2.5),
    "like_factories": lambda i: torch.zeros_like(i.x) + torch.full_like(i.x, 3) + i.x.new_ones(6),
    "scalar_tensor": lambda i: torch.where(i.mask, torch.scalar_tensor(2.0), i.x),
    "bucketize": lambda i: torch.bucketize(i.x, i.b.sort()[0]),
    "complex": lambda i: (i.z * i.z.conj(), torch.view_as_real(i.z + 1), (i.z * 2).abs(), i.z.conj().imag + 1),
    "complex_conjugate_kept": lambda i: torch.view_as_real((i.z.conj().clone() @ i.z.t().conj()).resolve_conj()),
    "complex_rope": lambda i: torch.view_as_real(torch.view_as_complex(i.q.view(2, 4, 5, 4, 2)) * i.z[0, 0]).flatten(3),
    "polar_fft": lambda i: torch.fft.rfft(i.x).abs() + torch.polar(i.x[:, :4], i.y[:, :4]).real,
    "negative_view": lambda i: torch._neg_view(i.x + 1) * 2,
    "sdpa": lambda i: F.scaled_dot_product_attention(i.q, i.k, i.v),
    "sdpa_causal": lambda i: F.scaled_dot_product_attention(i.q, i.k[:, :, :5], i.v[:, :, :5], is_causal=True),
    "sdpa_mask": lambda i: F.scaled_dot_product_attention(
        i.q, i.k, i.v, attn_mask=i.q.sum(-1, True).expand(2, 4, 5, 7)
    ),
    "sdpa_gqa": lambda i: F.scaled_dot_product_attention(i.q, i.k[:, :2], i.v[:, :2], enable_gqa=True),
    "sdpa_scale_bool": lambda i: F.scaled_dot_product_attention(
        i.q, i.k, i.v, attn_mask=i.q.sum(-1, True) > i.k.sum(-1)[:, :, None], scale=0.3
    ),
    "sdpa_transposed": lambda i: F.scaled_dot_product_attention(
        i.q.transpose(1, 2), i.k[:, :, :5].transpose(1, 2), i.v[:, :, :5].transpose(1, 2)
    ).transpose(1, 2),
    "empty_inputs": lambda i: (torch.cat([i.none, i.x]), i.none.sum(0), i.none + 1),
    "only_a_view": lambda i: i.x[1:],
    "input_itself": lambda i: i.x,
    "out_variant": lambda i: torch.mul(i.x, i.y, out=torch.empty(4, 6)),
    "same_input_twice": lambda i: i.x * i.x + i.x,
    "foreach": lambda i: torch._foreach_add(torch._foreach_mul([i.x, i.y], 2.0), [i.y, i.x]),
    "double_use_of_temporary": lambda i: (lambda t: (t + 1) * (t - 1))(i.x * 3),
    "meshgrid_tril_mask": lambda i: i.x.masked_fill(torch.arange(6) > torch.arange(4)[:, None], -torch.inf).softmax(-1),
    "dropout_eval": lambda i: F.dropout(i.x, 0.5, training=False) * 2,
    "addcmul_lerp": lambda i: torch.addcmul(i.x, i.y, i.y, value=0.5).lerp(i.y, 0.25),
    "remainder_shift": lambda i: (i.ids % 3, i.ids // 2, i.ids << 1, ~i.mask & (i.x > 0)),
}


@case
def in_place(i: Inputs) -> Results:
    t = i.x + 1
    t.add_(i.y).mul_(2).clamp_(min=0)
    t += 1
    return t


@case
def in_place_on_a_view(i: Inputs) -> Results:
    t = i.x + 1
    t[1:3].mul_(3)
    t[:, 0] = i.y[:, 1]
    t.t()[2].sub_(1)
    t.view(-1)[5] = 7.0
    t.unsqueeze(0).select(2, 1).zero_()
    return t


@case
def in_place_on_chunks(i: Inputs) -> Results:
    t = F.linear(i.x, i.w)
    for n, part in enumerate(t.chunk(4, -1)):
        part.mul_(n + 2)
    return t


@case
def in_place_metadata(i: Inputs) -> Results:
    t = i.x + 1
    t.transpose_(0, 1)
    t.unsqueeze_(0)
    return t.squeeze_(0) * 2


@case
def assignment(i: Inputs) -> Results:
    t = torch.zeros(4, 6)
    t[i.mask] = 0.5
    t[:2] = i.x[2:]
    t[3] = 1
    t[2, 1:3] = i.y[0, :2]
    return t


@case
def external_in_place(i: Inputs) -> Results:
    i.state.mul_(2)
    i.state[3:7].add_(i.x)
    i.count.add_(1)
    i.count[1:2] = i.ids[:1]
    return i.state + 1


@case
def external_write_then_read(i: Inputs) -> Results:
    i.state.index_copy_(0, i.rows, i.x)
    return i.state.index_select(0, i.rows.flip(0)) * 2


@case
def index_put(i: Inputs) -> Results:
    i.state[i.rows] = i.x
    return i.state[i.rows] + 1


@case
def index_put_accumulate(i: Inputs) -> Results:
    t = i.table.clone()
    t.index_put_((i.ids,), i.x, accumulate=True)
    i.state.index_put_((i.rows, i.ids), i.y[:, 0], accumulate=False)
    return t.index_add(0, i.ids, i.y)


@case
def scatter(i: Inputs) -> Results:
    where = i.ids[:, None].expand(4, 6)
    t = i.table.scatter(0, where[:1], i.x[:1])
    i.state.scatter_add_(0, where, i.y)
    return t, i.table.scatter_reduce(0, where, i.x, "amax"), torch.zeros(4, 6).scatter_(1, i.ids[:, None], 1.0)


@case
def masked_writes(i: Inputs) -> Results:
    t = i.x.clone()
    t.masked_fill_(i.mask, 2.0)
    t[i.y > 1] = -1.0
    i.state[:4].masked_fill_(i.mask, 0.0)
    return t, i.x.masked_fill(~i.mask, i.scalar), i.x.masked_scatter(i.mask, i.y)


@case
def fills(i: Inputs) -> Results:
    t = torch.empty(4, 6)
    t.fill_(i.scalar)
    t[0].fill_(3)
    i.state[0].fill_(4.0)
    i.state[1].copy_(i.half[0])
    return t


@case
def foreach_in_place(i: Inputs) -> Results:
    mine = [i.x + 0, i.y + 0]
    torch._foreach_mul_(mine, 2.0)
    torch._foreach_add_([i.state[:4], i.state[4:8]], mine)
    torch._foreach_copy_([i.state[8:9], i.state[9:]], [i.x[:1], i.y[:1]])
    return mine


@case
def foreach_on_both_sides(i: Inputs) -> Results:
    mine = i.x + 0
    torch._foreach_add_([mine, i.state[:4]], [i.y, i.x])
    return mine * 2


@case
def out_variants(i: Inputs) -> Results:
    given = torch.empty(4, 6)
    torch.add(i.x, i.y, out=given)
    torch.mul(i.x, i.y, out=i.state[:4])
    values, places = torch.empty(4), torch.empty(4, dtype=torch.int64)
    torch.max(i.x, 1, out=(values, places))
    return given, values, places


@case
def out_partly_external(i: Inputs) -> Results:
    places = torch.empty(4, dtype=torch.int64)
    torch.max(i.x, 1, out=(i.state[0, :4], places))
    return places + 1


@case
def batch_norm_statistics(i: Inputs) -> Results:
    return torch.ops.aten._native_batch_norm_legit(i.image, None, None, i.b[:3], i.b[3:6], True, 0.1, 1e-5)[0]


@case
def swap_through_temporaries(i: Inputs) -> Results:
    a, b = i.x + 0, i.y + 0
    for _ in range(3):
        a, b = b * 2, a + b
    return a, b


@case
def reuse_of_freed_bytes(i: Inputs) -> Results:
    t = i.x
    for n in range(6):
        t = (t + n).relu() * 0.5
    return t


@case
def rope(i: Inputs) -> Results:
    angle = i.ids[:, None] * 0.1 * torch.arange(3)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    left, right = i.x.chunk(2, -1)
    return i.x * cos + torch.cat([-right, left], -1) * sin


@case
def decoder_layer(i: Inputs) -> Results:
    h = F.rms_norm(i.q.flatten(0, 2), (8,), i.b)
    q, k, v = (F.linear(h, m).view(2, 4, 5, 8) for m in (i.q[0, 0, 0].diag(), i.k[0, 0, 0].diag(), i.v[0, 0, 0].diag()))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 8)
    h = h + F.linear(a, i.q[1, 1, 1].diag())
    return h + F.silu(h) * h.sigmoid_()
