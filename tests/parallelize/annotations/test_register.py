"""`register_op`: what an annotation says, that it is verified, and that the checker follows it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.parallelize.annotations.annotation import Annotation, AnnotationError
from neuronx_dist.parallelize.annotations.register import register_op
from neuronx_dist.parallelize.api import parallelize
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.generated.keys import key_of
from neuronx_dist.program.recording import TracingError
from neuronx_dist.rules.spec import RULES, same
from neuronx_dist.spmd import P, R, S
from neuronx_dist.weights.shard_spec import gather_full
from neuronx_dist.weights.shard_spec import spec_of as spec_of_param
from tests.parallelize.support import registered_ops


@pytest.fixture(autouse=True)
def _forget():
    known = dict(RULES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("default", ResourceWarning)  # the collector also frees what other tests left
        yield
    for function in [function for function in RULES if function not in known]:
        del RULES[function]


def matmul(x, w):
    return x @ w.t()


def attention(q, k, v, heads=2):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def spec_of(function, *args, **kwargs):
    return RULES[function].spec(*args, **kwargs)


def test_an_annotation_becomes_a_label_spec():
    op = register_op("m k+, n k+ -> m n")(matmul)
    spec = spec_of(op, torch.zeros(3, 4), torch.zeros(5, 4))
    assert [len(dims) for dims in spec.ins] == [2, 2]
    (m, k), (n, k2) = spec.ins
    assert k == k2 and spec.outs == ((m, n),) and spec.reduced == {k[0]: "sum"} and not spec.fixed
    assert spec.sizes == {m[0]: 3, k[0]: 4, n[0]: 5}
    assert RULES[op].linear == ((0,), (1,)) and RULES[op].name == "matmul"


def test_inner_factors_have_the_sizes_of_arguments():
    op = register_op("b s^ (heads d^), b t^ (heads d^), b t^ (heads d^) -> b s^ (heads d^)")(attention)
    q, kv = torch.zeros(2, 3, 12), torch.zeros(2, 5, 12)
    spec = spec_of(op, q, kv, v=kv, heads=3)
    (b,), _, (heads, d) = spec.ins[0]
    assert spec.sizes[heads] == 3 and spec.sizes[d] == 4 and spec.sizes[b] == 2
    assert heads not in spec.fixed and d in spec.fixed and spec.outs[0] == spec.ins[0]
    assert "does not split it (d)" in spec.fixed[d] and RULES[op].linear == ((2,),)


def test_stars_questions_numbers_and_functions_of_the_inputs():
    read = Annotation.read("* h, ? -> * h")
    dims, spec = read.spec([(2, 3, 4), (7,)], {}, "f")
    assert dims[0] == spec.outs[0] and len(dims[0]) == 3 and set(spec.fixed) == {dims[1][0][0]}
    assert read.spec([(4,), None], {}, "f")[0] == [((0,),), None]
    dims, spec = Annotation.read("3 a, 1 a -> a").spec([(3, 5), (1, 5)], {}, "f")
    assert dims[1][0] == () and dims[0][0][0] in spec.fixed

    def annotation(x, dim):
        names = ["a", "b"]
        names[dim] += "+"
        return f"{' '.join(names)} -> {names[1 - dim]}"

    summed = register_op(annotation, "summed", example=lambda: ((torch.randn(4, 6).double(), 1), {}))(
        lambda x, dim: x.sum(dim)
    )
    assert spec_of(summed, torch.zeros(2, 4), 0).outs == (((1,),),) and RULES[summed].name == "summed"


@pytest.mark.parametrize(
    "annotation, function, message",
    [
        ("m k, k -> m", lambda x, w: x @ w, "k is in no output: write k\\+"),
        ("m k+ -> m k", lambda x: x, "k\\+ is summed over, so it cannot be in an output"),
        ("m k", lambda x: x, "must be 'inputs -> outputs'"),
        ("m -> ?", lambda x: x, "for inputs only; write the dims"),
        ("m* -> m", lambda x: x, "'m\\*' is no dim"),
        ("(m -> m", lambda x: x, "an unmatched parenthesis"),
        ("m k -> m k", lambda x: x.softmax(1), "halves along k do not combine to result 0.*write k\\^"),
        ("m k+ -> m", lambda x: x.amax(1), "halves along k .*write k\\^"),
        ("m k^ -> m", lambda x: x.sum(), "returns shapes \\[\\[\\]\\], but annotation .* expects \\[\\[6\\]\\]"),
        ("m, n^ -> m", lambda x: x, "has 1 parameters, but annotation .* has 2 inputs"),
        ("m k -> (m k)", lambda x: x.t().reshape(-1), "two halves along"),
        ("m k -> m k", lambda x: x.add_(1), "writes to its argument x: return a new tensor"),
    ],
)
def test_what_is_wrong_is_refused(annotation, function, message):
    function.__name__ = "wrong"
    with pytest.raises(AnnotationError, match=message):
        register_op(annotation)(function)
    assert not [rule for rule in RULES.values() if rule.name == "wrong"]


@pytest.mark.parametrize(
    "shapes, message",
    [
        ([(3, 4), (5, 6)], "a dim of size 6 does not fit \\(k\\) with k=4"),
        ([(3, 4, 1), (5, 4)], "input 0 of shape \\[3, 4, 1\\]: the input must have 2 dims"),
    ],
)
def test_calls_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(AnnotationError, match=message):
        Annotation.read("m k+, n k+ -> m n").spec(shapes, {}, "f")
    with pytest.raises(AnnotationError, match="the sizes of a and b in \\(a b\\) are unknown"):
        Annotation.read("(a b) -> a b").spec([(6,)], {}, "f")


def test_what_cannot_be_verified_is_said():
    def needs(x, table):
        return x[table]

    with pytest.warns(UserWarning, match="needs is not verified, because its argument table has no default"):
        register_op("m^ -> n^")(needs)

    def picky(x):
        assert x.shape[0] == 5
        return x

    with pytest.warns(UserWarning, match="picky is not verified, because it raises AssertionError on \\[\\[4\\]\\]"):
        register_op("m -> m")(picky)
    register_op("m -> m", example=lambda: ((torch.zeros(4),), {}))(lambda x: x)


class Scaled(torch.autograd.Function):
    """x * w for each row, with a gradient of `w` that is right, and one of `x` that is right as long as rows are whole.

    `mistake` is one of "" (right), "rows" (the gradient of x mixes rows), "mean" (that of w is averaged), "none".
    """

    @staticmethod
    def forward(ctx, x, w, mistake):
        ctx.save_for_backward(x, w)
        ctx.mistake = mistake
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if ctx.mistake == "none":
            raise NotImplementedError("it has no backward")
        of_x, of_w = grad * w, grad * x
        if ctx.mistake == "rows":
            of_x = of_x - of_x.mean(0)
        return of_x, of_w.mean(0) if ctx.mistake == "mean" else of_w.sum(0), None


@pytest.mark.parametrize("mistake, operand", [("rows", "x"), ("mean", "w")])
def test_a_backward_whose_pieces_do_not_make_up_the_whole_is_refused(mistake, operand):
    def scaled(x, w, mistake=mistake):
        return Scaled.apply(x, w, mistake)

    with pytest.raises(
        AnnotationError,
        match=f"the gradients of two halves along m do not combine to the gradient of {operand} .*write m\\^",
    ):
        register_op("m k, k -> m k")(scaled)
    assert not [rule for rule in RULES.values() if rule.name == "scaled"]
    register_op("m^ k, k -> m^ k")(scaled)


def test_a_right_backward_and_none():
    register_op("m k, k -> m k")(lambda x, w, mistake="": Scaled.apply(x, w, mistake))
    with pytest.warns(UserWarning, match="backward of none is not verified, because it raises NotImplementedError: it"):
        register_op("m k, k -> m k", "none")(lambda x, w, mistake="none": Scaled.apply(x, w, mistake))
    # Two results, of which both halves of m have the second one.
    register_op("m k, k -> m k, k")(lambda x, w: (x * w, w.square()))


def test_linearity_is_measured():
    square = register_op("m k+ -> m", "square")(lambda x: x.square().sum(1))
    double = register_op("m k+ -> m", "double")(lambda x: 2 * x.sum(1))
    given = register_op("m k+ -> m", "given", linear=[0])(lambda x: x.square().sum(1))
    assert [RULES[op].linear for op in (square, double, given)] == [(), ((0,),), ((0,),)]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x**3) @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return (grad @ w.t()) * 3 * x**2, (x**3).t() @ grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return Cubed.apply(x, self.weight)


def test_the_checker_sees_one_call_and_its_types():
    """Rows of x cut: S(0) in, S(0) out; k cut: P; a fixed dim cut: refused with the annotation."""
    apply = Cubed.apply
    try:
        register_op("m k+, k+ n -> m n", "cubed")(Cubed.apply)
        x, w = torch.randn(4, 4), torch.randn(4, 6)
        assert torch.equal(Cubed.apply(x, w), apply(x, w))
        with nxd.comm.as_rank(nxd.Mesh(2, tp=2), 0), spmd.typecheck():
            rows = spmd.assert_type(torch.randn(2, 4), {"tp": S(0)})
            whole = spmd.assert_type(torch.randn(4, 6), {"tp": R})
            assert spmd.get_local_type(Cubed.apply(rows, whole))["tp"] == S(0)
            inner = spmd.assert_type(torch.randn(4, 2), {"tp": S(1)})
            cut = spmd.assert_type(torch.randn(2, 6), {"tp": S(0)})
            assert spmd.get_local_type(Cubed.apply(inner, cut))["tp"] == P
    finally:
        Cubed.apply = apply


def test_a_function_is_replaced_in_its_module():
    global matmul
    original = matmul
    try:
        op = register_op("m k+, n k+ -> m n")(original)
        assert matmul is op is not original and op.__wrapped__ is original
    finally:
        matmul = original


class Registered(nn.Module):
    """One attention of four heads, and a custom autograd function between two registered layers."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 4) for _ in range(3)])
        self.up, self.down = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, x, target):
        q, k, v = (registered_ops.scaled_linear(x, weight) for weight in self.qkv)
        x = registered_ops.attention(q, k, v, 4)
        x = registered_ops.scaled_linear(
            registered_ops.Cubed.apply(registered_ops.scaled_linear(x, self.up)), self.down
        )
        return (x - target).square().sum()


@pytest.mark.parametrize(
    "annotation, options",
    [
        ("m k^, n^ k^ -> m n^", {}),
        (lambda x, w: "m k+, n k+ -> m n", {}),
        ("m k+, n k+ -> m n", {"linear": [0]}),
        ("m k+, n k+ -> m n", {"random": True}),
    ],
)
def test_another_registration_is_another_key(annotation, options):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6))

        def forward(self, x):
            return matmul(x, self.weight)

    def keyed(annotation, **options):
        global matmul
        before = matmul
        try:
            register_op(annotation, example=lambda: ([torch.ones(2, 6), torch.ones(4, 6)], {}), **options)(matmul)
            return key_of(Example(Net(), {"x": torch.zeros(2, 6)}), "tp", ComputeConfig(2, 2))
        finally:
            matmul = before

    key = keyed("m k+, n k+ -> m n")
    assert keyed("m k+, n k+ -> m n") == key
    lines = key.differences(keyed(annotation, **options))
    assert any("matmul" in line for line in lines), lines


def test_another_rule_is_another_key():
    def keyed(spec, **fields):
        spmd.register_rule(attention, **fields)(spec)
        return key_of(Example(nn.Linear(2, 2), {"input": torch.zeros(2, 2)}), "tp", ComputeConfig(2, 2))

    rows = lambda q, k, v: same(q.shape)  # noqa: E731
    key = keyed(rows)
    assert keyed(rows) == key and not any("relu" in line for line in key.program), (
        "the package's rules are no part of it"
    )
    for other in (keyed(lambda q, k, v: same(q.shape)._replace(fixed={0: "rows mix"})), keyed(rows, linear=((0,),))):
        assert any("attention" in line or "rule_is_another_key" in line for line in key.differences(other))


def test_registered_functions_are_divided(tmp_path):
    """Heads and columns are cut, and the pieces equal one process."""
    torch.manual_seed(0)
    module = Registered().double()
    x, target = torch.randn(1, 12, 8).double(), torch.randn(1, 12, 8).double()
    loss = module(x, target)
    loss.backward()
    expected = {name: param.grad for name, param in module.named_parameters()}
    config = ComputeConfig(2, 2)

    def program():
        ours = parallelize(module, {"x": x, "target": target}, "tp", config, gen_savedir=tmp_path)
        result = ours(x, target)
        result.backward()
        grads = {name: gather_full(param.grad, spec_of_param(param)) for name, param in ours.named_parameters()}
        return result.detach(), grads, sum(param.numel() for param in ours.parameters())

    for result, grads, numbers in comm.threads.run(config.mesh(), program):
        torch.testing.assert_close(result, loss.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-10)
        assert numbers < sum(param.numel() for param in module.parameters())
    text = next(tmp_path.rglob("gencode0.py")).read_text()
    assert "Cubed.apply(" in text and "scaled_linear" in text
    assert ", 2)  # [1, 12, 4 of 8] S(2)" in text  # two of the four heads on each rank


class Routed(nn.Module):
    """A layer of experts, whose tokens are in the values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.randn(3, 16, 4)), nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return registered_ops.experts(x, chosen, weights, self.gate_up, self.down).square().sum()


@pytest.mark.parametrize("plan", [1, 2])
def test_a_function_that_asks_for_values_is_proven_by_its_annotation(plan, tmp_path):
    """The check has no values: it takes shapes from the annotation. The hidden dim of all experts is cut."""
    torch.manual_seed(0)
    module, x = Routed().double(), torch.randn(6, 4).double()
    loss = module(x)
    loss.backward()
    expected = {name: param.grad for name, param in module.named_parameters()}
    config = ComputeConfig(plan, plan)

    def program():
        ours = parallelize(module, {"x": x}, "tp", config, gen_savedir=tmp_path)
        result = ours(x)
        result.backward()
        grads = {name: gather_full(param.grad, spec_of_param(param)) for name, param in ours.named_parameters()}
        return result.detach(), grads, ours.down.shape

    for result, grads, shape in comm.threads.run(config.mesh(), program):
        torch.testing.assert_close(result, loss.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-10)
        assert shape == (3, 4, 8 // plan)


def test_results_without_values_have_the_dtypes_of_the_example():
    def picked(x, scores):
        return x * int(scores.sum()), scores.sum(0).long()

    example = lambda: ((torch.ones(4, 2), torch.ones(4, 2)), {})  # noqa: E731
    for number, options in enumerate(({"example": example, "linear": []}, {"random": True})):
        op = register_op("m^ k^, m^ k^ -> m^ k^, k^", f"picked {number}", **options)(picked)
        with FakeTensorMode():
            x = torch.ones(6, 2, dtype=torch.bfloat16, requires_grad=True)
            products, sums = op(x, torch.ones(6, 2))
            products.sum().backward()
        assert (products.shape, products.dtype) == ((6, 2), torch.bfloat16)
        assert (sums.shape, sums.dtype) == ((2,), torch.bfloat16 if number else torch.int64)
        assert x.grad.shape == x.shape


class Speech(nn.Module):
    """Frames to words, and a loss of lengths that forward takes."""

    def __init__(self, losses):
        super().__init__()
        self.losses, self.head = losses, nn.Linear(8, 5)

    def forward(self, x, targets, steps, lengths):
        return self.losses(self.head(x).log_softmax(-1).transpose(0, 1), targets, steps, lengths).mean()


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_ctc_loss_is_refused_with_a_registration_that_is_divided(policy, tmp_path):
    torch.manual_seed(0)
    _, targets, *lengths = registered_ops.paths()[0]
    arguments = dict(zip(["x", "targets", "steps", "lengths"], [torch.randn(4, 6, 8).double(), targets, *lengths]))
    config = ComputeConfig(2, 2)
    with pytest.raises(TracingError, match=r"ctc_loss needs the values of its lengths.* n -> n'\)\(function\)"):
        parallelize(Speech(F.ctc_loss).double(), arguments, policy, config, gen_savedir=tmp_path, load_module=False)
    module = Speech(registered_ops.ctc_losses).double()
    loss = module(**arguments)
    loss.backward()

    def program():
        ours = parallelize(module, arguments, policy, config, gen_savedir=tmp_path)
        result = ours(**arguments)
        result.backward()
        return result.detach(), [gather_full(param.grad, spec_of_param(param)) for param in ours.parameters()]

    for result, grads in comm.threads.run(config.mesh(), program):
        torch.testing.assert_close(result, loss.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grads, [param.grad for param in module.parameters()], rtol=1e-10, atol=1e-10)
