"""`rearrange` against permutes and reshapes written by hand."""

import pytest
import torch

from lanewise import grad, rearrange, vmap

IMAGES = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)


PATTERNS = [
    ("a b c d -> a b c d", {}, lambda x: x),
    ("b c h w -> b h w c", {}, lambda x: x.permute(0, 2, 3, 1)),
    ("b c h w -> (b h) w c", {}, lambda x: x.permute(0, 2, 3, 1).reshape(8, 6, 3)),
    ("b c h w -> (h b) w c", {}, lambda x: x.permute(2, 0, 3, 1).reshape(8, 6, 3)),
    ("b c h w -> (w h c b)", {}, lambda x: x.permute(3, 2, 1, 0).reshape(-1)),
    ("b c (h p) (w q) -> b (c p q) h w", {"p": 2, "q": 3},
     lambda x: x.reshape(2, 3, 2, 2, 2, 3).permute(0, 1, 3, 5, 2, 4).reshape(2, 18, 2, 2)),
    ("b c (p h) w -> p b c h w", {"h": 2}, lambda x: x.reshape(2, 3, 2, 2, 6).permute(2, 0, 1, 3, 4)),
    ("b c (p h) w -> p b c h w", {"h": 2, "p": 2}, lambda x: x.reshape(2, 3, 2, 2, 6).permute(2, 0, 1, 3, 4)),
    ("... w -> w ...", {}, lambda x: x.permute(3, 0, 1, 2)),
    ("b ... w -> w (...) b", {}, lambda x: x.permute(3, 1, 2, 0).reshape(6, 12, 2)),
    ("b ... -> b (...)", {}, lambda x: x.reshape(2, -1)),
    ("... -> (...)", {}, lambda x: x.reshape(-1)),
    ("a b c d ... -> ... d c b a", {}, lambda x: x.permute(3, 2, 1, 0)),
    ("b c h w -> b 1 c () h w", {}, lambda x: x[:, None, :, None]),
    ("b(c)h w->b h(w c)", {}, lambda x: x.permute(0, 2, 3, 1).reshape(2, 4, 18)),
    ("Ä c b2 w_0 -> c Ä w_0 b2", {}, lambda x: x.permute(1, 0, 3, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "lengths", "by_hand"), PATTERNS)
def test_values(pattern, lengths, by_hand):
    result = rearrange(IMAGES, pattern, **lengths)
    expected = by_hand(IMAGES)
    assert result.shape == expected.shape
    assert torch.equal(result, expected)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch.func has a rearrange from torch 2.13 on")
@pytest.mark.parametrize(("pattern", "lengths", "by_hand"), PATTERNS)
def test_as_the_peer(pattern, lengths, by_hand):
    assert torch.equal(rearrange(IMAGES, pattern, **lengths), torch.func.rearrange(IMAGES, pattern, **lengths))


def test_axes_of_length_one_come_and_go():
    x = torch.randn(1, 3, 1)
    assert torch.equal(rearrange(x, "1 a () -> a"), x[0, :, 0])
    assert torch.equal(rearrange(x, "1 a 1 -> 1 1 a"), x[:, :, 0][:, None])
    assert rearrange(torch.tensor(2.0), "->").shape == ()
    assert rearrange(torch.tensor(2.0), " -> 1 1").shape == (1, 1)
    assert rearrange(torch.tensor(2.0), "... -> ... 1").shape == (1,)


def test_a_keyword_is_a_name_like_any_other():
    assert torch.equal(rearrange(torch.ones(2, 3), "in out -> out in"), torch.ones(3, 2))


def test_axes_of_length_zero():
    assert rearrange(torch.zeros(0, 3), "(a b) c -> c a b", a=2).shape == (3, 2, 0)
    assert rearrange(torch.zeros(0, 3), "(a b) c -> c a b", a=0, b=5).shape == (3, 0, 5)


def test_a_list_is_stacked():
    rows = [torch.arange(3.0), torch.arange(3.0, 6.0)]
    assert torch.equal(rearrange(rows, "r c -> c r"), torch.stack(rows, dim=1))


def test_a_view_where_possible():
    assert rearrange(IMAGES, "b c (h p) w -> p b h c w", p=2).untyped_storage().data_ptr() == IMAGES.data_ptr()


def test_gradient_goes_back_to_its_place():
    x = torch.randn(4, 3, requires_grad=True)
    weights = torch.randn(2, 6)
    (rearrange(x, "(a b) c -> b (c a)", a=2) * weights).sum().backward()
    expected = torch.empty(4, 3)
    for a in range(2):
        for b in range(2):
            for c in range(3):
                expected[2 * a + b, c] = weights[b, 2 * c + a]
    assert x.grad is not None and torch.equal(x.grad, expected)


@pytest.mark.parametrize("in_dim", [0, 1, 3])
def test_inside_transforms(in_dim):
    lanes = IMAGES.movedim(0, in_dim)
    result = vmap(lambda x: rearrange(x, "c (h p) ... -> p (... c) h", p=2), in_dims=in_dim)(lanes)
    expected = IMAGES.reshape(2, 3, 2, 2, 6).permute(0, 3, 4, 1, 2).reshape(2, 2, 18, 2)
    assert torch.equal(result, expected)
    weights = torch.arange(72.0).reshape(6, 12)
    slope = vmap(grad(lambda x: (rearrange(x, "c h w -> w (c h)") * weights).sum()), in_dims=in_dim)(lanes)
    assert torch.equal(slope, weights.reshape(6, 3, 4).permute(1, 2, 0).expand(2, 3, 4, 6))


def test_under_compile():
    compiled = torch.compile(lambda x: rearrange(x, "b c h w -> (b h) (c w)"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IMAGES), IMAGES.permute(0, 2, 1, 3).reshape(8, 18))


@pytest.mark.parametrize(
    ("pattern", "lengths", "phrase"),
    [
        ("a -> a", {}, r"Number of dimensions in pattern \(1\) must be equal to .* \(2\)"),
        ("a ... b c -> a ... b c", {}, r"Number of dimensions in pattern \(3\) must be less than or equal to .* \(2\)"),
        ("a c -> c", {}, r"Identifiers only on one side of rearrange expression \(should be on both\): \['a'\]"),
        ("a b -> a b z", {}, r"Identifiers only on one side of rearrange expression .*: \['z'\]"),
        ("a b -> a b", {"z": 2, "...": 1}, r"Identifiers not found in rearrange expression: \['...', 'z'\]"),
        ("a b", {}, "Pattern must contain a single '->' separator"),
        ("a b -> b -> a", {}, "Pattern must contain a single '->' separator"),
        ("a b -> a b 2", {}, "rearrange only supports unnamed axes of size 1, got 2"),
        ("a b -> (a (b))", {}, "brackets inside brackets not allowed"),
        ("a b) -> a b", {}, "Brackets are not balanced"),
        ("(a b -> a b", {}, "Imbalanced parentheses"),
        ("a a -> a", {}, "duplicate dimension 'a'"),
        ("(a a) b -> a b", {}, "duplicate dimension 'a'"),
        ("... a ... -> a", {}, "duplicate dimension '...'"),
        ("a _b -> a _b", {}, "Invalid axis identifier: '_b'"),
        ("a b_ -> a b_", {}, "Invalid axis identifier: 'b_'"),
        ("a 2b -> a 2b", {}, "Invalid axis identifier: '2b'"),
        ("a b -> ... a b", {}, "Ellipsis found in right side, but not left side"),
        ("(...) -> ...", {}, "ellipsis in parentheses is not allowed on the left side"),
        ("a .. b -> a b", {}, "dots only inside ellipsis"),
        ("a - b -> a b", {}, "Unknown character '-'"),
        ("a b -> a b", {"a": 7}, r"a=7 does not match the size 6, axis 0 of \[6, 4\] in 'a b -> a b'"),
        ("(a b) c -> a b c", {"a": 2, "b": 4}, r"a=2 \* b=4 does not match the size 6"),
        ("(a b) c -> a b c", {"a": 4}, "the length of 'b' would be 6 / 4"),
        ("(a b) c -> a b c", {"a": 0}, "the length of 'b' would be 6 / 0"),
        ("(a b) c -> a b c", {"a": -2}, "the length of axis 'a' is negative: -2"),
        ("(a b) c -> a b c", {}, r"cannot infer the lengths of \['a', 'b'\] at once"),
        ("1 a -> a", {}, "1 does not match the size 6"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(pattern, lengths, phrase):
    with pytest.raises(ValueError, match=phrase):
        rearrange(torch.zeros(6, 4), pattern, **lengths)


@pytest.mark.parametrize("length", [2.0, True, "2"])
def test_a_length_is_an_int(length):
    with pytest.raises(TypeError, match="rearrange axis lengths must be integers, got: <class"):
        rearrange(torch.zeros(6, 4), "(a b) c -> a b c", a=length)


def test_the_pattern_is_a_string():
    with pytest.raises(TypeError, match="the pattern must be a string, got int"):
        rearrange(torch.zeros(6, 4), 3)  # pyright: ignore[reportArgumentType]
