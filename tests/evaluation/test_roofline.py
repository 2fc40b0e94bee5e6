# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The simulation: counted by hand on round numbers, and beside what the paper published."""

import json
import runpy
from pathlib import Path

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

from dlite_hf import DLiteConfig
from dlite_hf.commands.train_cost import target_config
from dlite_hf.evaluation.costs import Drafter, Gpu, Target, Work
from dlite_hf.evaluation.paper import PAPER_SPEEDUP, PAPER_TAU
from dlite_hf.evaluation.roofline import GPUS, SIMULATED, compare_with_measurement, roofline_table, simulate
from tests import targets
from tests.evaluation.reports import measurement, plain, report, row


TINY = Qwen3Config(**{**targets.SIZES, "tie_word_embeddings": False})
# What a layer of TINY multiplies: q and o 32 x 32, k and v 32 x 16, three of 32 x 48 in its MLP.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
HEAD = 32 * 97
SLOW_MEMORY = Gpu("slow memory", flops=1e30, bandwidth=1e3, memory=1e9)
SLOW_PRODUCTS = Gpu("slow products", flops=1e3, bandwidth=1e30, memory=1e9)


def qwen3(size):
    config = target_config(f"Qwen/Qwen3-{size}")
    return config, Target.of(config), Drafter.of(DLiteConfig.from_target(config, mask_token_id=0))


def tiny_dlite(**overrides):
    return DLiteConfig.from_target(TINY, mask_token_id=0, **overrides)


def totals(steps):
    return sum(step.bytes for step in steps), sum(step.flops for step in steps)


def test_a_step_takes_the_longer_of_memory_and_products_and_its_launches():
    gpu = Gpu("round", flops=100.0, bandwidth=10.0, memory=1.0)
    assert Work(bytes=20, flops=100, kernels=3).seconds(gpu, 0.5) == 2.0 + 1.5
    assert Work(bytes=20, flops=400, kernels=0).seconds(gpu, 0.5) == 4.0


def test_a_forward_reads_weights_and_cache_and_multiplies_every_token():
    num_bytes, flops = totals(Target.of(TINY).forward(num_tokens=2, context=10, batch_size=3))
    cache = 5 * 2 * 2 * 8  # numbers a token: layers, keys and values, heads, their size
    assert num_bytes == 2 * (5 * LAYER + HEAD) + 2 * 3 * (10 + 2) * cache + 2 * 2 * 6 * 97
    assert flops == 2 * 6 * (5 * LAYER + HEAD) + 2 * 6 * 5 * (10 + 2) * 2 * 32


def test_quantised_layers_are_read_with_fewer_bytes_but_the_head_is_not():
    bytes_of = {size: totals(Target.of(TINY, size).forward(1, 0, 1))[0] for size in (2, 0.5)}
    assert bytes_of[2] - bytes_of[0.5] == 1.5 * 5 * LAYER
    # Embedding and head, untied, stay at two bytes, and so do the norms: two a layer, two of heads, the last.
    assert Target.of(TINY, 0.5).num_bytes == 0.5 * 5 * LAYER + 2 * (2 * HEAD + 5 * (2 * 32 + 2 * 8) + 32)


def test_sliding_layers_read_no_further_than_their_window():
    sizes = {**targets.SIZES, "layer_types": ["full_attention"] + 4 * ["sliding_attention"], "sliding_window": 8}
    target = Target.of(Qwen3Config(**{**sizes, "use_sliding_window": True}))
    assert target.windows == (None, 8, 8, 8, 8)
    assert target.kv_bytes(100, 1) == (100 + 4 * 8) * 2 * 2 * 8 * 2
    assert target.kv_bytes(5, 1) == 5 * 5 * 2 * 2 * 8 * 2
    assert Target.of(MistralConfig(**targets.SIZES, sliding_window=8)).windows == (8,) * 5


def test_dlite_reads_its_backbone_once_and_its_head_for_every_position():
    config = tiny_dlite(sequential_rank=16, num_draft_tokens=4, num_hidden_layers=2)
    drafter = Drafter.of(config)
    step = (2 * 16) * (2 * 16) + 2 * 16 + (16 + 32) * 16 + 16 + 97 * 16
    num_bytes, flops = totals(drafter.head(batch_size=1))
    assert num_bytes == 4 * 2 * (step + 2 * 97)
    assert flops == 4 * 2 * step
    norms = 2 * (2 * 32 + 2 * 8) + 2 * 32
    assert drafter.backbone_weights == 2 * LAYER + norms + 5 * 32  # and an embedding of five depths
    assert totals(drafter.backbone(context=1000, batch_size=1))[0] == 2 * drafter.backbone_weights


def test_only_a_drafter_with_a_history_pays_for_the_context():
    history = {
        "DLite": Drafter.of(tiny_dlite()),
        "teacher": Drafter.of(tiny_dlite(history_window=33)),
        "DFlash": Drafter.dflash(TINY),
    }
    per_token = 5 * 2 * 2 * 8 * 2
    assert {name: each.kv_bytes(1000, 2) for name, each in history.items()} == {
        "DLite": 0,
        "teacher": 2 * 32 * per_token,
        "DFlash": 2 * 1000 * per_token,
    }
    for name, each in history.items():
        grows = totals(each.backbone(1000, 1))[1] > totals(each.backbone(10, 1))[1]
        assert grows == (name != "DLite"), name


def test_dflash_projects_all_positions_at_once_and_dspark_adds_a_bias_to_each():
    (shared,) = Drafter.dflash(TINY, num_draft_tokens=4).head(batch_size=2)
    assert shared.bytes == 2 * (HEAD + 2 * 8 * 97)
    assert shared.flops == 2 * 8 * HEAD
    first, *steps = Drafter.dspark(TINY, num_draft_tokens=4).head(batch_size=2)
    assert first == shared
    assert [step.bytes for step in steps] == 4 * [2 * (97 * 256 + 2 * 2 * 97)]


def test_plain_over_a_round_times_tau_is_the_speedup():
    result = simulate(Target.of(TINY), Drafter.of(tiny_dlite()), SLOW_MEMORY, tau=3.0, context=50, launch_seconds=0.0)
    drafting = result["backbone_ms"] + result["head_ms"]
    assert result["round_ms"] == pytest.approx(result["verify_ms"] + drafting)
    assert result["speedup"] == pytest.approx(3 * result["plain_ms"] / result["round_ms"])
    assert result["tokens_per_second"] == pytest.approx(3000 / result["round_ms"])
    assert result["verify_share"] + result["backbone_share"] + result["head_share"] == pytest.approx(1)
    assert result["plain_ms"] == pytest.approx(totals(Target.of(TINY).forward(1, 50, 1))[0])  # 1 byte a millisecond


def test_a_verification_is_free_only_where_memory_decides():
    def verify_over_plain(gpu):
        result = simulate(Target.of(TINY), Drafter.of(tiny_dlite()), gpu, tau=1.0, context=0, launch_seconds=0.0)
        return result["verify_ms"] / result["plain_ms"]

    assert verify_over_plain(SLOW_MEMORY) < 1.3
    assert verify_over_plain(SLOW_PRODUCTS) > 7.9


def test_launches_weigh_on_the_many_small_steps_of_a_head():
    def shares(launch_seconds):
        _, target, drafter = qwen3("8B")
        return simulate(target, drafter, GPUS["h800"], tau=3, context=0, launch_seconds=launch_seconds)["head_share"]

    assert shares(5e-6) > shares(0.0)


def test_the_time_split_of_the_paper():
    """8B on an H800: verification 81%, backbone 10%, head 9%; here the head comes out shorter."""
    _, target, drafter = qwen3("8B")
    split = simulate(target, drafter, GPUS["h800"], tau=3.19, context=2048)
    assert split["verify_share"] == pytest.approx(0.81, abs=0.03)
    assert split["backbone_share"] == pytest.approx(0.10, abs=0.015)
    assert split["head_share"] == pytest.approx(0.09, abs=0.035)


@pytest.mark.parametrize("size", ["4B", "8B"])
@pytest.mark.parametrize("arm", ["DLite", "DSpark"])
def test_the_speedups_of_the_paper_follow_from_its_tau(size, arm):
    config, target, dlite = qwen3(size)
    drafter = dlite if arm == "DLite" else Drafter.dspark(config)
    tau = PAPER_TAU["swe_bench"][f"{size} {arm}"]
    simulated = simulate(target, drafter, GPUS["h800"], tau=tau, context=32768)["speedup"]
    assert simulated == pytest.approx(PAPER_SPEEDUP["swe_bench"][f"{size} {arm}"], rel=0.1)


def test_the_longer_the_context_the_more_no_history_saves():
    config, target, dlite = qwen3("8B")
    gains = []
    for context in (512, 8192, 32768, 131072):
        speedups = [
            simulate(target, each, GPUS["h200"], tau=3, context=context)["speedup"]
            for each in (dlite, Drafter.dspark(config))
        ]
        gains.append(speedups[0] / speedups[1])
    assert gains == sorted(gains)
    assert gains[0] < gains[-1]


def test_weights_caches_and_drafter_must_fit():
    _, target, drafter = qwen3("4B")
    laptop = GPUS["rtx-4070-laptop"]
    assert not simulate(target, drafter, laptop, tau=2, context=512)["fits"]
    four_bits = Target.of(target_config("Qwen/Qwen3-4B"), weight_bytes=0.5)
    result = simulate(four_bits, drafter, laptop, tau=2, context=512)
    assert result["fits"]
    cache = 512 * 36 * 2048 * 2
    assert result["memory_bytes"] == four_bits.num_bytes + 2 * drafter.num_parameters + cache


def test_every_output_says_that_it_is_simulated():
    _, target, drafter = qwen3("4B")
    result = simulate(target, drafter, GPUS["rtx-4070-laptop"], tau=2, context=512, batch_size=2)
    assert json.loads(json.dumps(result)) == result
    assert result["simulated"] is True
    text = roofline_table([result])
    assert text.startswith(f"**{SIMULATED}**")
    assert "1 us a kernel, 2 bytes a weight" in text
    assert text.splitlines()[-1].startswith("| RTX 4070 laptop | DLite | 2.00 | 512 | 2 | ")
    assert "(does not fit)" in text


def simulated(**figures):
    _, target, drafter = qwen3("4B")
    return {**simulate(target, drafter, GPUS["h200"], tau=2, context=512), **figures}


def test_a_measurement_beside_the_simulation():
    # Plain: 10 tokens in 10 s behind the first. DLite: 5 rounds that emit 10 tokens in 5 s.
    dlite = measurement(rounds=5, emitted=10, drafting_seconds=1.0, verifying_seconds=3.5)
    figures = {"plain_ms": 500.0, "verify_ms": 700.0, "backbone_ms": 75.0, "head_ms": 25.0, "speedup": 1.6, "tau": 2.0}
    lines = compare_with_measurement(simulated(**figures), [row(dlite=dlite)], "dlite").splitlines()
    assert "1 rows, 106 tokens of context" in lines[0]
    assert lines[4:] == [
        "| ms a plain token | 500.00 | 1000.00 | 2.00 |",
        "| ms a verification | 700.00 | 700.00 | 1.00 |",
        "| ms of drafting a round | 100.00 | 200.00 | 2.00 |",
        "| ms of bookkeeping a round | 0.00 | 100.00 | - |",
        "| tau | 2.00 | 2.00 | 1.00 |",
        "| speedup of decoding | 1.60x | 2.00x | 1.25 |",
    ]


def test_what_was_not_counted_is_not_compared():
    text = compare_with_measurement(
        simulated(), [row(plain=plain(tokens=1, seconds=1.0), other=measurement())], "other"
    )
    assert text.count("| not measured | - |") == 6


def test_a_comparison_needs_rows_of_one_sequence_with_both_methods():
    with pytest.raises(ValueError, match="of 2 sequences at once"):
        compare_with_measurement(simulated(batch_size=2), [row(dlite=measurement())], "dlite")
    with pytest.raises(ValueError, match="both 'plain' and 'dlite'"):
        compare_with_measurement(simulated(), [row()], "dlite")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 8.5, "context": 0}, "`tau` is 8.5, but DLite emits from 1 to 8 tokens"),
        ({"tau": 0.5, "context": 0}, "`tau` is 0.5"),
        ({"tau": 2, "context": -1}, "`context` is -1"),
        ({"tau": 2, "context": 0, "batch_size": 0}, "`batch_size` 0"),
    ],
)
def test_inputs_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(Target.of(TINY), Drafter.of(tiny_dlite()), GPUS["h200"], **options)


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(ValueError, match="hidden size 32 and 97 tokens, but this one has 2560 and 151936"):
        simulate(qwen3("4B")[1], Drafter.of(tiny_dlite()), GPUS["h200"], tau=2, context=0)


def test_targets_that_are_not_counted_are_refused():
    with pytest.raises(ValueError, match="mixture of experts"):
        Target.of(Qwen3MoeConfig(**targets.SIZES))
    config = LlamaConfig(**targets.SIZES)
    config.layer_types = ["linear_attention"] * 5
    with pytest.raises(ValueError, match="linear_attention"):
        Target.of(config)


def test_the_script_compares_with_the_method_that_is_named():
    """A report with confidence thresholds has several of one drafter."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "training" / "roofline.py"))
    counted = {"rounds": 4, "emitted": 10}
    made = report([row(dlite=measurement(**counted))])
    assert script["measured"](made, None) == ("dlite", made.rows, 2.5)
    rows = [row(**{"dlite": measurement(**counted), "dlite-0.2": measurement(rounds=5, emitted=10)})]
    made = report(rows, ("plain", "dlite", "dlite-0.2"))
    assert script["measured"](made, "dlite-0.2") == ("dlite-0.2", made.rows, 2.0)
    for name in (None, "plain"):
        with pytest.raises(ValueError, match=r"pass as `--method` one of \['dlite', 'dlite-0.2'\]"):
            script["measured"](made, name)
