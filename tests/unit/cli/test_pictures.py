"""The picture of which experts each kind of text used."""

import io

import numpy as np
import pytest
from rich.console import Console

from trimtab.cli.figure import save_figure
from trimtab.cli.pictures import full_share_of, routing_difference, shares, terminal_picture

ONE_EXPERT = np.array([[10, 0], [0, 4]])
OTHER_EXPERT = np.array([[0, 5], [2, 0]])


def drawn(counts, *, color_system=None, width=80):
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=color_system, force_terminal=color_system is not None)
    console.print(terminal_picture(counts, console))
    return out.getvalue()


def test_shares_are_per_layer_and_an_idle_layer_is_zero():
    assert shares(np.array([[3, 1], [0, 0]])).tolist() == [[0.75, 0.25], [0, 0]]


def test_routing_difference_is_zero_for_equal_shares_and_one_for_disjoint_experts():
    assert routing_difference(ONE_EXPERT, ONE_EXPERT * 7) == 0
    assert routing_difference(ONE_EXPERT, OTHER_EXPERT) == 1
    assert routing_difference(np.array([[1, 1]]), np.array([[1, 0]])) == 0.5


def test_the_terminal_shows_every_layer_kind_and_the_number_of_tokens_routed():
    text = drawn({"code": ONE_EXPERT, "German": OTHER_EXPERT})
    assert "0-1" in text
    assert "tokens routed, summed over layers: code 14, German 7" in text
    assert "100%" in text  # the kinds share no expert
    assert "█" in text


def test_an_odd_number_of_layers_is_drawn_to_the_last():
    counts = {"code": np.ones((3, 2), int)}
    assert "2 " in drawn(counts)
    assert "▀" in drawn(counts, color_system="truecolor")


def test_the_terminal_picture_fits_eighty_columns():
    counts = {kind: np.ones((30, 8), int) for kind in ("code", "English", "German", "maths")}
    assert max(map(len, drawn(counts).splitlines())) <= 80


def test_too_many_experts_for_a_terminal_are_left_to_the_png():
    assert "256 experts are too many for a terminal" in drawn({"code": np.ones((2, 256), int)})


def test_the_colours_end_above_an_even_spread():
    assert full_share_of({"code": np.ones((4, 8), int)}) == pytest.approx(1.5 / 8)
    assert full_share_of({"code": ONE_EXPERT}) == 1


def test_the_png_is_written_into_a_new_folder_and_is_not_blank(tmp_path):
    import matplotlib.image

    path = save_figure({"code": ONE_EXPERT, "German": OTHER_EXPERT}, tmp_path / "new" / "use.png", model="tiny")
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 500
    assert pixels[..., :3].std() > 0.1
