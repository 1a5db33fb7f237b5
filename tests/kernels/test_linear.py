"""One EXL3 linear: the rotated basis, the dequantised weight and tensor-parallel shares agree."""

import pytest
import torch

from expert_kernels import codec, ops, reference

pytestmark = pytest.mark.engine

K, N = 384, 256
Linear = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_linear(bits: float = 3.0, k: int = K, n: int = N) -> Linear:
    generator = torch.Generator().manual_seed(int(16 * bits))
    shape = (k // 16, n // 16, int(16 * bits))
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
    suh, svh = (torch.randn(d, generator=generator).half() for d in (k, n))
    return trellis, suh, svh


def rows(count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, K, dtype=dtype, generator=torch.Generator().manual_seed(count))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((got - expected).abs().max() / expected.abs().max())


def walsh(size: int) -> torch.Tensor:
    """[size, size] from the definition: (-1)^(number of bits set in row & column)."""
    signs = [[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64)


@pytest.mark.parametrize("bits", [1.5, 3.0, 8.0])
def test_the_dequantised_weight_is_the_product_of_its_five_factors(bits: float) -> None:
    trellis, suh, svh = random_linear(bits)
    h = walsh(128) / 128**0.5
    left, right = torch.block_diag(*[h] * (K // 128)), torch.block_diag(*[h] * (N // 128))
    middle = codec.decode_trellis(trellis, "mul1").double()
    expected = suh.double().diag() @ left @ middle @ right @ svh.double().diag()
    got = reference.dequantise(trellis, suh, svh, "mul1", torch.float64)
    assert error(got, expected) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_weights_are_the_float64_weights_rounded(dtype: torch.dtype) -> None:
    linear = random_linear()
    wide = reference.dequantise(*linear, "mcg", torch.float64)
    assert torch.equal(reference.dequantise(*linear, "mcg", dtype), wide.to(dtype))


@pytest.mark.parametrize("codebook", codec.CODEBOOKS)
def test_the_rotated_basis_gives_x_times_the_dequantised_weight(codebook: str) -> None:
    linear = random_linear()
    x = rows(7)
    expected = x @ reference.dequantise(*linear, codebook, torch.float64)
    assert error(reference.linear(x, *linear, codebook), expected) < 1e-12
    assert error(reference.linear(x.float(), *linear, codebook).double(), expected) < 2e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_narrow_activations_are_rounded_once_at_the_end(dtype: torch.dtype, bound: float) -> None:
    trellis, suh, svh = random_linear()
    suh = suh / 64
    x = rows(5, torch.float32).to(dtype)
    y = reference.linear(x, trellis, suh, svh, "mcg")
    assert y.dtype == dtype
    assert torch.equal(y, reference.linear(x.float(), trellis, suh, svh, "mcg").to(dtype))
    exact = reference.linear(x.double(), trellis, suh, svh, "mcg")
    assert error(y.double(), exact) < bound


def test_leading_dimensions_are_kept_and_may_be_empty() -> None:
    linear = random_linear()
    assert reference.linear(rows(6).view(2, 3, K), *linear, "mcg").shape == (2, 3, N)
    assert reference.linear(rows(0), *linear, "mcg").shape == (0, N)


def test_shares_of_the_outputs_side_by_side_are_the_whole() -> None:
    trellis, suh, svh = random_linear()
    x = rows(4)
    shares = [(trellis[:, 8 * i : 8 * i + 8], suh, svh[128 * i : 128 * i + 128]) for i in (0, 1)]
    whole = reference.linear(x, trellis, suh, svh, "mcg")
    parts = torch.cat([reference.linear(x, *share, "mcg") for share in shares], dim=1)
    assert error(parts, whole) < 1e-13
    weights = torch.cat([reference.dequantise(*share, "mcg") for share in shares], dim=1)
    assert torch.equal(weights, reference.dequantise(trellis, suh, svh, "mcg"))


def test_shares_of_the_inputs_add_up_to_the_whole() -> None:
    trellis, suh, svh = random_linear()
    x = rows(4)
    cuts = [slice(0, 128), slice(128, K)]
    shares = [(trellis[c.start // 16 : c.stop // 16], suh[c], svh) for c in cuts]
    parts = [
        reference.linear(x[:, c], *share, "mcg") for c, share in zip(cuts, shares, strict=True)
    ]
    assert error(sum(parts), reference.linear(x, trellis, suh, svh, "mcg")) < 1e-13
    weights = torch.cat([reference.dequantise(*share, "mcg") for share in shares])
    assert torch.equal(weights, reference.dequantise(trellis, suh, svh, "mcg"))


def test_a_share_that_cuts_a_rotation_block_is_refused() -> None:
    trellis, suh, svh = random_linear(k=576, n=128)
    with pytest.raises(ValueError, match="576 inputs and 128 outputs: both must be multiples"):
        reference.linear(torch.zeros(1, 576), trellis, suh, svh, "mcg")


def test_scales_and_inputs_of_another_size_are_refused() -> None:
    trellis, suh, svh = random_linear()
    with pytest.raises(ValueError, match=r"suh has shape \[256\], the trellis wants \[384\]"):
        reference.dequantise(trellis, suh[:256], svh, "mcg")
    with pytest.raises(ValueError, match=r"svh has shape \[128\], the trellis wants \[256\]"):
        reference.dequantise(trellis, suh, svh[:128], "mcg")
    with pytest.raises(ValueError, match="x has 256 columns, the linear has 384 inputs"):
        reference.linear(rows(1)[:, :256], trellis, suh, svh, "mcg")


def matrix(codebook: str = "mcg", columns: tuple[int, int] = (0, N), k: int = K) -> ops.Matrix:
    return ops.Matrix(*random_linear(k=k), codebook, columns)


def test_matrices_side_by_side_give_what_each_gives_alone() -> None:
    x, matrices = rows(2).view(1, 2, K), [matrix(), matrix(columns=(5, 100))]
    y = ops.linear(x, matrices)
    assert y.shape == (1, 2, N + 95)
    alone = [reference.linear(x, m.trellis, m.suh, m.svh, "mcg") for m in matrices]
    assert torch.equal(y, torch.cat([alone[0], alone[1][..., 5:100]], dim=-1))


def test_matrices_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="x has 256 columns for matrices of 384 inputs"):
        ops.linear(rows(1)[:, :256], [matrix()])
    with pytest.raises(
        ValueError, match=r"384 inputs \(mcg\), 384 inputs \(mul1\): they must share both"
    ):
        ops.linear(rows(1), [matrix(), matrix("mul1")])
    with pytest.raises(ValueError, match=r"matrices of 384 inputs .*, 512 inputs .* share both"):
        ops.linear(rows(1), [matrix(), matrix(k=512)])
    with pytest.raises(ValueError, match="outputs 0 to 257 are asked of 256"):
        matrix(columns=(0, 257))
    trellis, suh, svh = random_linear()
    with pytest.raises(ValueError, match="the trellis is not contiguous"):
        ops.Matrix(trellis[:, ::2], suh, svh[:128], "mcg", (0, 128))
