"""What a run needs: against the memory of processes and counted sizes, and refusals word by word."""

import os
import pickle
import re
import resource
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from transformers import PretrainedConfig

from outliers import UserError
from outliers.commands.ablate import Ablation
from outliers.commands.damage import Damage
from outliers.commands.latency import Latency
from outliers.commands.sweep import Sweep
from outliers.commands.trace import Tracing
from outliers.config.experiment import Experiment
from outliers.metrics.measurement import MemoryNeeds, stored_bytes
from outliers.models.load import find_config
from outliers.quantization.schemes import get_scheme
from outliers.runs import forecast as module
from outliers.runs.forecast import (
    LEFT,
    PROCESS,
    WORKSPACES,
    FreeBytes,
    ModelRun,
    Need,
    forecast,
    model_run_of,
    model_shape,
    need_of,
)
from outliers.runs.frame import records_in as read_rows
from outliers.runs.free import free_in_groups, free_memory
from outliers.runs.planner import Planner
from outliers.subjects.causal import Pretrained
from outliers.terminal.amounts import duration, size
from tests.conftest import CONFIGS, needs_smollm2
from tests.kept import KEPT
from tests.small_models import make_model

NOTHING = MemoryNeeds()
MUCH = FreeBytes(10**15, 10**15, 10**15, 10**15)
PARAMETERS = 6_658_473_984  # of OPT-6.7B
OUTSIDE = 4096 * (50272 + 2050 + 2)
LAYER = (PARAMETERS - OUTSIDE) // 32
PROJECTIONS = 12 * 4096**2
STATES = 256 * 4096 * 4  # bytes of a block
# What is made while a block passes a layer, twice as much with what allocators keep of it.
PASSING = 2 * 4 * 256 * (18 + 2) * 4096


@pytest.fixture
def opt(tmp_path, monkeypatch) -> PretrainedConfig:
    """The configuration of OPT-6.7B, beside a folder `my-opt` without weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-opt").mkdir()
    return find_config("facebook/opt-6.7b")


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What is printed."""
    found = []
    monkeypatch.setattr(module.logger, "info", found.append)
    return found


def asked(config: PretrainedConfig, needs: MemoryNeeds = NOTHING, model=("my-opt", None), **settings) -> ModelRun:
    """The run of a model of this configuration."""
    settings = {"name": "test", "block": 256, "blocks": 32} | settings
    subject = Pretrained(*model, settings.get("spec") or Experiment(**settings))
    subject.config = config
    return model_run_of(subject, needs)


def need(config: PretrainedConfig, needs: MemoryNeeds = NOTHING, room: FreeBytes = MUCH, **settings) -> Need:
    return need_of(asked(config, needs, **settings), room)


def together(*names: str) -> tuple[int, int]:
    return stored_bytes(map(get_scheme, names))


def refusal(requests: list[ModelRun], room: FreeBytes) -> str:
    with pytest.raises(UserError) as refused:
        forecast(requests, room)
    return str(refused.value)


@pytest.mark.parametrize("case", [*CONFIGS, "qwen3-moe-dense-first"])
def test_every_architecture_has_a_shape(case):
    model = make_model(case)
    shape = model_shape(model.config)
    assert shape.layers == 2
    if case in CONFIGS:  # all layers of which are equal
        assert shape.weights == sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    assert 0 < shape.largest_projection <= shape.projections < shape.layer
    assert need_of(asked(model.config, model=("pocket/gpt2-0.1m", None), block=8), MUCH).memory > PROCESS


SPECS = {"trace": Tracing, "ablation": Ablation, "damage": Damage}


def share_forecast(spec: Experiment, rows: list[dict]) -> float:
    """How large the forecast of an experiment is, as a share of the memory that its rows needed."""
    (plan,) = spec.plans()
    plan.subject.prepare()
    model_runs = Planner(None, None, None, "").model_runs([plan], [next(plan.stages)])
    return max(need_of(run, MUCH).memory for run in model_runs) / max(row["peak_memory_bytes"] for row in rows)


@pytest.mark.parametrize("kind", SPECS)
@needs_smollm2
def test_memory_is_that_of_kept_rows(kind):
    rows = read_rows(KEPT / ("damage/smollm2-135m" if kind == "damage" else f"smollm2-135m/{kind}"))
    assert 0.9 < share_forecast(SPECS[kind](model="smollm2-135m", block=rows[0]["block"], blocks=1), rows) < 1.3


@pytest.mark.nightly("outliers/runs/", "outliers/metrics/", "outliers/quantization/")
@needs_smollm2
@pytest.mark.parametrize("draws", [1, 4])
def test_memory_is_that_of_a_sweep(tmp_path, draws):
    """In a process of its own; the kept sweep is of code that held the operands of two draws at a time."""
    asked = {"models": ["smollm2-135m"], "schemes": ["llm.int8"], "draws": draws, "block": 512, "blocks": 1}
    program = f"import outliers; outliers.run(outliers.Sweep(**{asked}), {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    assert 0.9 < share_forecast(Sweep(**asked), read_rows(tmp_path)) < 1.3


def test_what_a_run_needs_is_counted(opt):
    whole = PROCESS + LEFT + 4 * PARAMETERS + PASSING
    assert need(opt, blocks=8) == Need("my-opt", whole, 0, 0, 0)
    quantizing = 2 * 2 * 4 * 4 * 4096**2
    int8, doubled, two = together("absmax"), together("absmax+hadamard"), together("absmax", "llm.int8")
    in_turn = (together("fp32"), int8, together("absmax-row"))
    for beside, count in {(int8,): 1, in_turn: 1, (doubled,): 5, (two,): 2}.items():
        assert need(opt, MemoryNeeds(beside), blocks=8).memory == whole + quantizing + 32 * PROJECTIONS * count
    wide, copied = together("fp8-e4m3"), doubled  # in float32, and codes with a copy
    assert (wide, copied) == ((4, 0), (1, 1))
    in_bfloat16 = [need(opt, MemoryNeeds(of), blocks=8, dtype="bfloat16") for of in [(wide,), (wide, copied)]]
    assert in_bfloat16[0] == in_bfloat16[1]
    assert need(opt, MemoryNeeds(attention_matrices=3), blocks=8).memory == whole + 2 * 4 * 3 * 32 * 256**2
    logits = need(opt, MemoryNeeds(logit_matrices=2), blocks=8).memory
    assert logits == whole - PASSING + 2 * 4 * 2 * 256 * 50272


def test_a_streamed_run_has_one_layer_and_what_is_kept_of_all_blocks(opt):
    streamed = {"blocks": 8, "stream": True}
    weights = 4 * (OUTSIDE + LAYER)
    least = PROCESS + LEFT + weights + PASSING
    assert need(opt, MemoryNeeds(variant_count=3), **streamed).memory == least + 3 * 8 * STATES
    on_disk = need(opt, MemoryNeeds(variant_count=3), **streamed, memory=3 * 8 * STATES - 1)
    assert (on_disk.memory, on_disk.disk) == (least, 3 * 8 * STATES)
    assert need(opt, MemoryNeeds(kept_states=2), **streamed).memory == least + (1 + 2) * 8 * STATES
    in_part = need(opt, MemoryNeeds(kept_states=2), **streamed, memory=8 * STATES)
    assert (in_part.memory, in_part.disk) == (least + 8 * STATES, 2 * 8 * STATES)
    assert pickle.loads(pickle.dumps(on_disk)) == on_disk


def test_a_streamed_run_has_one_expert_of_a_layer_that_is_larger_than_its_memory():
    config = make_model("mixtral").config
    shape, states = model_shape(config), 8 * 32 * config.hidden_size * 4
    of_experts = 3 * config.num_local_experts * config.hidden_size * config.intermediate_size
    assert (shape.experts, shape.expert) == (of_experts, of_experts // config.num_local_experts)
    needed = [
        need(config, MemoryNeeds((together("absmax"),)), block=32, blocks=8, stream=True, memory=memory).memory
        for memory in (4 * shape.layer, 4 * shape.layer - 1)
    ]
    joined, others = 4 * (shape.largest_parameter - shape.largest_projection), of_experts - shape.expert
    assert needed[0] - needed[1] == (4 + 2) * others + others + joined  # half of the weights again in the heap
    assert 4 * shape.layer > states


def _kept(spec: Latency, scheme: str) -> MemoryNeeds:
    """What the times of all batches under a scheme keep."""
    (plan,) = spec.model_copy(update={"schemes": [scheme]}).plans()
    cells = next(plan.stages)
    return cells[0].metric.measurement.memory_needs(cells)


def test_a_generation_keeps_keys_and_values_and_codes_alone(opt):
    spec = Latency(models=["my-opt"], prompt=100, tokens=28, batches=[1, 4], dtype="bfloat16")
    exact, int8 = (need(opt, _kept(spec, name), spec=spec).memory for name in ("fp32", "llm.int8"))
    quantizing = 2 * 2 * 4 * 4 * 4096**2
    assert exact - int8 == 32 * PROJECTIONS - quantizing
    short = spec.model_copy(update={"tokens": 27})
    fewer = need(opt, _kept(short, "fp32"), spec=short).memory
    assert exact - fewer == 4 * 32 * 2 * 4096 * 2


def test_hidden_states_are_on_a_gpu_where_they_leave_room(opt):
    settings = {"device": "cuda", "blocks": 100, "stream": True}
    fits = 4 * OUTSIDE + 2 * 100 * STATES
    on_gpu, on_host = (need(opt, **settings, room=MUCH._replace(memory=free, gpus=free)) for free in (fits, fits - 2))
    assert on_gpu.memory - on_host.memory == on_host.host - on_gpu.host == 100 * STATES
    assert on_gpu.host == PROCESS
    resident = need(opt, device="cuda", room=MUCH._replace(gpus=1))
    assert (resident.memory, resident.host) == (WORKSPACES + 4 * PARAMETERS + PASSING, PROCESS + 4 * PARAMETERS)


def test_a_model_too_large_is_refused_with_what_would_help(opt, told):
    requests = [asked(opt)]
    assert refusal(requests, MUCH._replace(memory=int(21.46e9))) == (
        "'my-opt' needs 27.8 GB of memory in float32 and 21.5 GB are free; "
        "with --stream it needs 3.0 GB, with --dtype bfloat16 it needs 14.5 GB"
    )
    assert refusal(requests, MUCH._replace(memory=int(2.3e9))) == (
        "'my-opt' needs 27.8 GB of memory in float32 and 2.3 GB are free; "
        "with --stream --dtype bfloat16 it needs 2.1 GB"
    )
    gpus = MUCH._replace(memory=int(14e9), gpus=int(28e9))
    requests = [asked(opt, device="cuda")]
    assert refusal(requests, gpus) == (
        "'my-opt' needs 26.9 GB of GPU memory in float32 and 14.0 GB are free; with --stream it needs 2.0 GB, "
        "with --dtype bfloat16 it needs 13.5 GB, with --device auto it needs 26.9 GB"
    )
    assert not told


def test_hidden_states_too_large_are_refused_with_how_many_fit(opt, constants):
    streamed = {"blocks": 2000, "dtype": "bfloat16", "stream": True}
    room = MUCH._replace(memory=int(3.6e9))
    assert refusal([asked(opt, **streamed)], room) == (
        "'my-opt' needs 6.2 GB of memory in bfloat16 and 3.6 GB are free; "
        "with --memory 1GB it needs 2.0 GB and 4.2 GB of disk, with --blocks 763 it needs 3.6 GB"
    )
    constants("tempfile", tempdir="/tmp")
    assert refusal([asked(opt, **streamed, memory=10**9)], room._replace(temporary=10**9)) == (
        "'my-opt' needs 4.2 GB of disk for hidden states and 1.0 GB are free in '/tmp'; set TMPDIR to a folder with "
        "more room, with --blocks 476 it needs 3.0 GB"
    )
    assert "with --stream --block " in refusal([asked(opt, block=2048, blocks=1)], room._replace(memory=int(2.9e9)))


def test_only_options_that_a_measurement_has_are_proposed(opt):
    requests = [asked(opt, MemoryNeeds(options=frozenset(("dtype", "device"))))]
    assert refusal(requests, MUCH._replace(memory=int(21.46e9))).endswith(
        "21.5 GB are free; with --dtype bfloat16 it needs 14.5 GB"
    )
    assert refusal(requests, MUCH._replace(memory=10**9)).endswith("no option makes it fit on this machine")


def test_downloads_are_what_the_hub_has_and_its_cache_has_not(opt, constants, lacking):
    shards = {"model-00001-of-2.safetensors": 3 * 10**9, "model-00002-of-2.safetensors": 2 * 10**9}
    sizes = {"config.json": 7, **shards, "consolidated.safetensors": 5 * 10**9, "onnx/c.safetensors": 9}
    siblings = [SimpleNamespace(rfilename=name, size=count) for name, count in sizes.items()]
    hub = SimpleNamespace(model_info=lambda *_, **__: SimpleNamespace(siblings=siblings))
    constants("outliers.models.source", HfApi=lambda: hub)
    lacking("outliers.models.source.try_to_load_from_cache")
    constants(module.__name__, HF_HUB_CACHE="/cache")
    models = [("some/model", None), ("some/model", "old")]
    requests = [asked(opt, model=model) for model in models]
    assert [request.download for request in requests] == 2 * [5 * 10**9]
    assert refusal(requests, MUCH._replace(cache=8 * 10**9)) == (
        "the models need 10.0 GB for downloads and 8.0 GB are free in '/cache'; "
        "set HF_HOME to a folder with more room, or give fewer models"
    )
    assert refusal(requests, MUCH._replace(cache=4 * 10**9)) == (
        "'some/model' needs 5.0 GB of disk for its download and 4.0 GB are free in '/cache'; "
        "set HF_HOME to a folder with more room"
    )
    del hub.model_info
    assert asked(opt, model=models[0]).download is None


def test_a_need_that_is_much_of_what_is_free_is_said_once(opt, told):
    requests = 2 * [asked(opt)]
    forecast(requests, MUCH)
    assert not told
    forecast(requests, MUCH._replace(memory=40 * 10**9))
    assert told == ["'my-opt' needs 27.8 GB of memory in float32 and 40.0 GB are free"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (size(999), "1 kB"),
        (size(54_321_000), "54 MB"),
        (size(27.08e9), "27.1 GB"),
        (size(265e9), "265 GB"),
        (duration(0.2), "1 s"),
        (duration(80), "80 s"),
        (duration(179), "3 min"),
        (duration(9000), "2.5 h"),
        (duration(86400 * 3), "3.0 d"),
    ],
)
def test_amounts_are_said_for_people(text, said):
    assert text == said


def test_limits_of_control_groups_count(tmp_path):
    def group(folder, **files):
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(content)

    stat = "anon 5\nactive_file 30\ninactive_file 4\n"
    group(tmp_path / "job", memory__max="max\n", memory__current="7", memory__stat=stat)
    group(tmp_path / "job" / "task", memory__max="1000\n", memory__current="400\n", memory__stat=stat)
    (tmp_path / "memory.max").write_text("5000")
    (tmp_path / "memory.current").write_text("4900")
    (tmp_path / "memory.stat").write_text(stat)
    assert list(free_in_groups(tmp_path, ["0::/job/task", "3:cpu:/job"])) == [634, 134]
    assert list(free_in_groups(tmp_path, ["0::/not/here"])) == [134]
    old = "total_active_file 1\ntotal_inactive_file 2\n"
    group(tmp_path / "memory", memory__limit_in_bytes="90", memory__usage_in_bytes="50", memory__stat=old)
    assert list(free_in_groups(tmp_path, ["4:memory:/gone", "9:name=systemd:/"])) == [43]


@pytest.mark.parametrize("missing", ["memory.stat", "memory.current"])
def test_a_control_group_may_lack_files(tmp_path, missing):
    files = {"memory.max": "90", "memory.current": "50", "memory.stat": "active_file 1\ninactive_file 2\n"}
    for name in files.keys() - {missing}:
        (tmp_path / name).write_text(files[name])
    assert list(free_in_groups(tmp_path, ["0::/"])) == [{"memory.stat": 40, "memory.current": 93}[missing]]
    (tmp_path / "memory.stat").write_text("anon 7\n")
    assert list(free_in_groups(tmp_path, ["0::/"])) == [{"memory.stat": 40, "memory.current": 90}[missing]]


def test_free_memory_is_that_of_the_machine_at_most():
    assert 0 < free_memory()[0] <= psutil.virtual_memory().total


@pytest.mark.parametrize(("name", "field", "option"), [("RLIMIT_AS", "vms", "-v"), ("RLIMIT_DATA", "data", "-d")])
def test_a_limit_of_the_process_counts(opt, monkeypatch, name, field, option):
    """What is left of it, with the memory that the process has."""
    taken, usual = psutil.Process().memory_info(), resource.getrlimit
    limit = getattr(taken, field) + 3 * 10**9
    monkeypatch.setattr(
        resource, "getrlimit", lambda asked: (limit, -1) if asked == getattr(resource, name) else usual(asked)
    )
    free, _ = free_memory()
    assert free == pytest.approx(taken.rss - taken.shared + 3 * 10**9, abs=10**8)
    said = refusal([asked(opt)], module.room_of("cpu"))
    assert f" are free under `ulimit {option}`; with --stream it needs " in said
    limit -= 3 * 10**9
    said = refusal([asked(opt)], module.room_of("cpu"))
    assert said.endswith(f"; no option makes it fit under `ulimit {option}`")


@pytest.mark.parametrize("option", ["-v", "-d"])
def test_a_limit_too_low_to_begin_is_one_line(tmp_path, option):
    """Before torch is imported, which never returns under some."""
    command = f"ulimit {option} 400000; exec {sys.executable} -m outliers.measure pocket/gpt2-0.1m --out {tmp_path}/out"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert re.match(rf"error: `ulimit {option}` leaves \d+ MB; expected at least .* set a higher limit", done.stderr)
