"""The embedding kernels in Triton's interpreter against fp64: values, gradients of repeated ids,
the dropout's mask word by word, layouts, and proof that wrong kernels are seen."""

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels import Ops
from gptile.kernels import embedding as kernels
from gptile.kernels.embedding import CASES, embedding_reference, embedding_triton
from gptile.kernels.philox import philox4x32

FUNCTIONS = [embedding_reference, embedding_triton]


def inputs(rows: int, tokens: int, cols: int, vocab: int) -> list[Tensor]:
    """ids as often as words are, positions, wte, wpe (two positions more than needed), gradient."""
    frequencies = 1 / torch.arange(1, vocab + 1)
    ids = torch.multinomial(frequencies, rows * tokens, replacement=True).view(rows, tokens)
    wte, wpe = torch.randn(vocab, cols) + 0.4, torch.randn(tokens + 2, cols) * 0.5 - 0.1
    return [ids, torch.arange(tokens) + 1, wte, wpe, torch.randn(rows, tokens, cols) + 0.3]


def mask_of(module: ModuleType, ids: Tensor, cols: int, p: float) -> Tensor:
    """Which elements ``module`` keeps when called from this state of the generator, as 1 and 0."""
    state = torch.get_rng_state()
    positions = torch.zeros(ids.shape[1], dtype=torch.int64)
    out = module.embedding_triton(ids * 0, positions, torch.ones(1, cols), torch.zeros(1, cols), p)
    torch.set_rng_state(state)
    return (out != 0).double()


def results(function: Callable, tensors: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of ``function(ids, positions, wte, wpe)``."""
    ids, positions, *tables = tensors[:4]
    wte, wpe = (t.detach().to(dtype).requires_grad_() for t in tables)
    out = function(ids, positions, wte, wpe)
    out.backward(tensors[4].to(dtype))
    return {"out": out.detach(), "dwte": wte.grad, "dwpe": wpe.grad}


def wrong(
    module: ModuleType, tensors: list[Tensor], dtype: torch.dtype = torch.float32, p: float = 0.0
) -> list[str]:
    """What is further from fp64 than twice (forward) or three times (backward) PyTorch's error."""
    factor = torch.ones((), dtype=torch.float64)
    if p:
        factor = mask_of(module, tensors[0], tensors[2].shape[1], p) / (1 - p)

    def truth(ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
        return (wte[ids] + wpe[positions]) * factor

    def pytorch(ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
        return (F.embedding(ids, wte) + F.embedding(positions, wpe)) * factor.to(dtype)

    stored = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    exact = results(truth, stored, torch.float64)
    reference = results(pytorch, stored, dtype)
    ours = results(lambda *arguments: module.embedding_triton(*arguments, p), stored, dtype)

    def error(got: Tensor, expected: Tensor) -> float:
        return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-12)).item()

    floor = torch.finfo(dtype).eps
    return [
        name
        for name, expected in exact.items()
        if not error(ours[name], expected)
        <= (2 if name == "out" else 3) * error(reference[name], expected) + floor
    ]


@pytest.mark.parametrize(
    ("dtype", "p"),
    [(torch.float32, 0.0), (torch.float16, 0.0), (torch.bfloat16, 0.0), (torch.float16, 0.1)],
)
@pytest.mark.parametrize("case", CASES)
def test_every_case_against_fp64(case: str, dtype: torch.dtype, p: float) -> None:
    rows, tokens, cols, vocab = CASES[case].values()
    assert wrong(kernels, inputs(min(rows, 2), min(tokens, 5), cols, min(vocab, 6)), dtype, p) == []


@pytest.mark.parametrize("cols", [2, 3, 4, 5, 255, 256, 511, 512, 513, 1023, 1024, 1025, 2049])
def test_widths_around_every_block_edge(cols: int) -> None:
    for p in (0.0, 0.5):
        assert wrong(kernels, inputs(2, 2, cols, 3), p=p) == []


@pytest.mark.parametrize("times", [1, 4, 5, 8, 9])
def test_ids_that_repeat_around_every_block_edge(times: int) -> None:
    """The first, the last and one other id of the table, among ids that do not repeat."""
    tensors = inputs(1, 3 * times + 3, 8, 9)
    ids = torch.tensor([0, 8, 4] * times + [1, 2, 7])
    tensors[0] = ids[torch.randperm(len(ids))].unsqueeze(0)
    assert wrong(kernels, tensors, p=0.5) == []


@pytest.mark.parametrize("ids", ["one", "all different"])
def test_gradient_is_that_of_pytorch(ids: str) -> None:
    tensors = inputs(2, 15, 16, 40)
    tensors[0] = torch.full((2, 15), 5) if ids == "one" else torch.randperm(40)[:30].view(2, 15)
    assert wrong(kernels, tensors) == []
    ours = results(embedding_triton, tensors, torch.float32)
    for name, expected in results(embedding_reference, tensors, torch.float32).items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("positions", ["one sequence", "one each", "strided"])
def test_indices_of_either_dtype_and_any_strides(positions: str, dtype: torch.dtype) -> None:
    tensors = inputs(3, 5, 12, 9)
    if positions != "one sequence":
        tensors[1] = torch.randint(7, (3, 5))
    if positions == "strided":
        tensors[:2] = (t.T.contiguous().T for t in tensors[:2])
    tensors[:2] = (t.to(dtype) for t in tensors[:2])
    assert wrong(kernels, tensors, p=0.5) == []


def beside_nan(t: Tensor, dim: int) -> Tensor:
    return torch.stack([t, torch.full_like(t, torch.nan)], dim)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "column-strided": lambda t: beside_nan(t, -1)[..., 0],
    "row-strided": lambda t: beside_nan(t, -2)[..., 0, :],
    "transposed": lambda t: t.mT.contiguous().mT,
    "first axis last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize(("table", "dout"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_layouts_of_tables_and_gradient(table: str, dout: str) -> None:
    tensors = inputs(2, 3, 20, 5)
    tensors[2:4] = (LAYOUTS[table](t) for t in tensors[2:4])
    tensors[4] = LAYOUTS[dout](tensors[4])
    assert wrong(kernels, tensors) == []


def test_a_summed_output_and_rows_that_are_not_looked_up() -> None:
    ids, positions = torch.tensor([[1, 3, 3]]), torch.tensor([0, 1, 1])
    wte, wpe = torch.full((5, 8), torch.nan), torch.full((4, 8), torch.nan)
    wte[[1, 3]], wpe[:2] = 2.0, 0.5
    out = embedding_triton(ids, positions, wte.requires_grad_(), wpe.requires_grad_())
    out.sum().backward()  # a stride-0 gradient
    assert torch.equal(out, torch.full((1, 3, 8), 2.5))
    assert wte.grad[:, 0].tolist() == [0, 1, 0, 2, 0]
    assert wpe.grad[:, 7].tolist() == [1, 2, 0, 0]


def test_sums_of_16_bit_gradients_are_not_16_bit() -> None:
    """2048 + 1 is 2048 in fp16."""
    wte = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
    ids = torch.ones(1, 301, dtype=torch.int64)
    dout = torch.ones(1, 301, 3, dtype=torch.float16)
    dout[0, 0] = 2048
    embedding_triton(ids, torch.zeros_like(ids), wte, wte.detach()).backward(dout)
    assert wte.grad.tolist() == [[0] * 3, [2348] * 3]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_gradients_are_the_same_bits_every_time(p: float) -> None:
    tensors = inputs(2, 20, 16, 5)
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        runs.append(results(lambda *a: embedding_triton(*a, p), tensors, torch.float32))
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name


def is_philox(module: ModuleType, cols: int, p: float) -> bool:
    """Whether the mask is what the docstring says: the words of Philox, four to a counter."""
    for seed in (2**40 + 3, 2**63 - 1):
        ids, tables = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 1, cols)
        out = module.launch_forward(ids, ids, *tables, p, torch.tensor([seed]))
        fours = -(-cols // 4)
        counter = torch.arange(6 * fours)
        zero = torch.zeros_like(counter)
        key = (torch.full_like(counter, seed & 0xFFFFFFFF), torch.full_like(counter, seed >> 32))
        words = torch.stack(philox4x32((counter, zero, zero, zero), key), -1)
        kept = (words % 2**31 >= p * 2**31).view(2, 3, 4 * fours)[..., :cols]
        if not torch.equal(out, torch.where(kept, torch.tensor(2 / (1 - p)), 0)):
            return False
    return True


@pytest.mark.parametrize("cols", [1, 2, 4, 7, 256, 257, 1030])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_is_philox_of_seed_and_place(cols: int, p: float) -> None:
    assert is_philox(kernels, cols, p)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_dropout_keeps_its_share_scaled_and_drops_the_same_gradient(
    p: float, function: Callable
) -> None:
    ids, positions = torch.zeros(4, 5, dtype=torch.int64), torch.arange(5)
    wte, wpe = torch.full((1, 1000), 1.5), torch.full((5, 1000), 0.5)
    wte.requires_grad_()
    wpe.requires_grad_()
    out = function(ids, positions, wte, wpe, p)
    kept = out != 0
    assert abs(kept.sum().item() - 20000 * (1 - p)) < 5 * (20000 * p * (1 - p)) ** 0.5
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 2 / (1 - p)))
    out.sum().backward()
    per_position = kept.sum(0) / (1 - p)
    torch.testing.assert_close(wpe.grad, per_position)
    torch.testing.assert_close(wte.grad[0], per_position.sum(0))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_generator_decides_the_mask(function: Callable) -> None:
    ids, positions, wte, wpe, _ = inputs(2, 3, 64, 5)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(function(ids, positions, wte, wpe, 0.5))
    first, again, other = outs
    following = function(ids, positions, wte, wpe, 0.5)
    assert torch.equal(first, again)
    for different in (other, following):
        assert ((different == 0) != (first == 0)).any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_dropout_no_number_is_drawn_and_with_all_dropped_nothing_is_left(
    function: Callable,
) -> None:
    ids, positions, wte, wpe, dout = inputs(2, 3, 64, 5)
    before = torch.get_rng_state()
    assert torch.equal(function(ids, positions, wte, wpe), wte[ids] + wpe[positions])
    assert torch.equal(torch.get_rng_state(), before)
    tensors = [ids, positions, wte, wpe, dout]
    for name, tensor in results(lambda *a: function(*a, 1.0), tensors, torch.float32).items():
        assert not tensor.any(), name


@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (2, 0)])
def test_no_tokens(rows: int, tokens: int) -> None:
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    wte, wpe = torch.randn(5, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    out = embedding_triton(ids, torch.arange(tokens), wte, wpe, 0.5)
    out.sum().backward()
    assert out.shape == (rows, tokens, 8)
    assert wte.grad.shape == (5, 8)
    assert not wte.grad.any()
    assert not wpe.grad.any()


def test_offsets_beyond_32_bits() -> None:
    """Only the pages that are written become real memory."""
    memory = torch.empty(2**31 + 64, dtype=torch.float16)
    ids, positions = torch.tensor([[2], [1], [0]]), torch.tensor([0])
    far, near = memory.as_strided((3, 8), (2**30, 1)), torch.randn(3, 8).half()
    far.copy_(near)
    expected = near[ids] + near[0]
    assert torch.equal(embedding_triton(ids, positions, far, near), expected)
    assert torch.equal(embedding_triton(positions.expand(3, 1), ids, near, far), expected)
    dwte, _ = kernels.launch_backward(far.unsqueeze(1), ids, positions, 3, 1, 0.0, None)
    assert torch.equal(dwte, near.flip(0))


def test_what_does_not_fit_is_refused() -> None:
    ids, positions, wte, wpe, _ = inputs(2, 3, 8, 5)
    refusals = (
        (TypeError, "ids must be int32", (ids.float(), positions, wte, wpe)),
        (TypeError, "positions must be int32", (ids, positions.short(), wte, wpe)),
        (ValueError, r"no positions \[2\]", (ids, positions[:2], wte, wpe)),
        (ValueError, r"no positions \[1, 3\]", (ids, positions.unsqueeze(0), wte, wpe)),
        (ValueError, "same width", (ids, positions, wte, wpe[:, :-1])),
        (ValueError, "same width and dtype", (ids, positions, wte, wpe.half())),
        (ValueError, "no probability", (ids, positions, wte, wpe, 1.5)),
        (ValueError, "no probability", (ids, positions, wte, wpe, -0.1)),
        (TypeError, "float64", (ids, positions, wte.double(), wpe.double())),
    )
    for error, message, arguments in refusals:
        with pytest.raises(error, match=message):
            embedding_triton(*arguments)


def test_an_id_outside_its_table_gives_nan_and_reads_nothing() -> None:
    wte, wpe = torch.randn(5, 8), torch.randn(3, 8)
    ids, positions = torch.tensor([[0, -1, 4], [5, 2, 2**40]]), torch.tensor([0, 1, 2])
    out = embedding_triton(ids, positions, wte, wpe)
    assert out.isnan().all(-1).tolist() == [[False, True, False], [True, False, True]]
    assert torch.equal(out[0, 0], wte[0] + wpe[0])
    assert embedding_triton(ids[:1, :1], torch.tensor([3]), wte, wpe).isnan().all()


@pytest.mark.parametrize("frozen", ["wte", "wpe"])
def test_a_frozen_table_costs_no_gradient(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"wte": torch.randn(5, 8), "wpe": torch.randn(3, 8)}
    for name, table in tables.items():
        table.requires_grad_(name != frozen)
    launched = []
    right = kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, *a, **k: (launched.append(kernel), right(kernel, *a, **k))
    )
    ids, positions = torch.tensor([[0, 1, 4]]), torch.arange(3)
    embedding_triton(ids, positions, **tables).square().sum().backward()
    assert launched == [kernels._forward_kernel, kernels._backward_kernel]
    ours = {name: table.grad for name, table in tables.items()}
    for table in tables.values():
        table.grad = None
    embedding_reference(ids, positions, **tables).square().sum().backward()
    for name, table in tables.items():
        assert (ours[name] is None) == (name == frozen)
        if name != frozen:
            torch.testing.assert_close(ours[name], table.grad)


def test_differentiating_twice_is_refused() -> None:
    ids, positions, wte, wpe, _ = inputs(1, 2, 8, 3)
    out = embedding_triton(ids, positions, wte.requires_grad_(), wpe)
    (gradient,) = torch.autograd.grad(out.square().sum(), wte, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_opcheck_and_compile() -> None:
    ids, positions, wte, wpe, dout = inputs(2, 3, 8, 5)
    tables = wte.requires_grad_(), wpe.requires_grad_()
    for dropout in ((0.0, None), (0.5, torch.tensor([7]))):
        arguments = (ids, positions, *tables, *dropout)
        torch.library.opcheck(torch.ops.gptile.embedding.default, arguments)
    compiled = torch.compile(embedding_triton, backend="aot_eager", fullgraph=True)
    for p in (0.0, 0.5):
        runs = []
        for function in (embedding_triton, compiled):
            torch.manual_seed(3)
            out = function(ids, positions, *tables, p)
            runs.append((out, *torch.autograd.grad(out, tables, dout)))
        for ours, expected in zip(*runs, strict=True):
            assert torch.equal(ours, expected)


def test_the_model_on_this_kernel_is_the_model(small_model: Callable) -> None:
    """The head's gradient and the embedding's add up in the weight that they share."""
    model = small_model(n_layer=1)
    ids, targets = torch.randint(61, (2, 2, 12)).unbind(0)
    twin = type(model)(model.config, Ops.torch().replace(embedding=embedding_triton)).eval()
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        m(ids, targets, logits_for="none").loss.backward()
    for (name, ours), reference in zip(twin.named_parameters(), model.parameters(), strict=True):
        error = (ours.grad - reference.grad).norm() / reference.grad.norm()
        assert error < 1e-6, name


PLANTED = {
    "tokens without positions": ("wte.to(tl.float32) + wpe.to(tl.float32)", "wte.to(tl.float32)"),
    "the row taken for the position": ("row % n_positions", "row // n_positions"),
    "the stride of wpe taken for wte's": ("token * wte_row_stride", "token * wpe_row_stride"),
    "not scaled": ("x * scale", "x"),
    "kept and dropped exchanged": (">= threshold", "< threshold"),
    "one word for two columns": ("tl.interleave(first, third)", "tl.interleave(second, fourth)"),
    "the sign kept in the word": ("(words & 0x7FFFFFFF)", "words"),
    "one mask for all rows": ("counters = row * tl.cdiv(n_cols, 4) +", "counters = row * 0 +"),
    "counters of two rows overlap": ("row * tl.cdiv(n_cols, 4)", "row * (n_cols // 4)"),
    "gradient not dropped": (
        "if DROPOUT:\n            counters = rows",
        "if False:\n            c = rows",
    ),
    "mask by place in the order": ("counters = rows *", "counters = places[:, None] *"),
    "the last of a run lost": ("mask = (places < end)", "mask = (places < end - 1)"),
    "more than a run": ("mask = (places < end)", "mask = (places < end + 1)"),
    "only the first of a run": ("range(begin, end, ROWS)", "range(begin, begin + 1, ROWS)"),
    "the last column lost": ("mask=cols < n_cols)", "mask=cols < n_cols - 1)"),
    "unsorted": (
        "ordered, order = torch.sort(index, stable=True)",
        "ordered, order = index.sort()[0], index",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    module = plant(kernels, *PLANTED[fault])
    tensors = inputs(2, 7, 18, 3)
    tensors[2] = beside_nan(tensors[2], 0)[0]
    tensors[2] = LAYOUTS["row-strided"](tensors[2])
    assert wrong(module, tensors, p=0.3) or not is_philox(module, 18, 0.5)
