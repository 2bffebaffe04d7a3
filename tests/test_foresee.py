"""Foreseeing: against runs of the whole measurement on whole models, counted sizes, and lines word by word."""

import pickle
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outliers.errors import UserError
from outliers.estimate import advice, needs, probe
from outliers.estimate.advice import Foreseen, announce, foresee, table
from outliers.estimate.needs import Need, Request, Room, free_in_groups, need_of
from outliers.estimate.probe import Cost, Costs, Moment, Part, find_costs, model_sizes
from outliers.experiment.runner import request_of, run
from outliers.measurements.ablation import ablation_parts, plan
from outliers.measurements.bench import Job
from outliers.measurements.damage.measurement import damage_parts
from outliers.measurements.damage.measurement import plan as plan_damage
from outliers.measurements.footprint import Storages
from outliers.measurements.latency import latency
from outliers.measurements.measurement import Passes, Workload
from outliers.measurements.perplexity import perplexity
from outliers.measurements.sweep import sweep_parts
from outliers.measurements.tracing import trace_parts
from outliers.models.anatomy import decoder_layers
from outliers.models.configs import find_config
from outliers.models.load import load_config
from outliers.quantization.schemes import TABLE1, get_scheme
from outliers.specification.kinds import DAMAGE_BY, Ablation, Settings
from outliers.terminal.amounts import duration, size
from tests.conftest import CONFIGS, make_model
from tests.test_commands import call

CPU = torch.device("cpu")
SMALL = {"n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 256, "vocab_size": 5000}
MUCH = Room(10**15, 10**15, 10**15, 10**15)
# A pass over a block takes 100 MB beside the weights, and the allocator thrice as much again.
BESIDE = 810_000_000  # that, the process and its libraries
COST = Cost(once=0.0, layer=0.5, rest=1.0, added=0, peak=100_000_000, first=0, further=0)


def schemes(*names: str):
    return [get_scheme(name) for name in names]


def requests_of(jobs: list[Job], settings: Settings, passes: Passes, left: float) -> list[Request]:
    known: dict = {}
    return [request_of(Workload(job, settings, passes), left, known) for job in jobs]


def job_of(config, name: str = "pocket/gpt2-0.1m") -> Job:
    """Nothing but the configuration and the name of a job is looked at."""
    return Job(name, None, config, torch.zeros(1, 2, dtype=torch.int64))


@pytest.fixture
def opt(tmp_path, monkeypatch):
    """A job of OPT-6.7B's shape in a folder without weights, whose reading takes no time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-opt").mkdir()
    return job_of(find_config("facebook/opt-6.7b"), "my-opt")


@pytest.fixture
def probed(monkeypatch):
    """Every part costs the same; the list has what was tried."""
    asked = []

    def pretend(config, dtype, device, block, passes):
        asked.append((dtype, block))
        return Costs([[COST for _ in parts] for parts in passes], copying=0.0, hashing=0.0)

    monkeypatch.setattr(needs, "find_costs", pretend)
    return asked


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What is printed."""
    found = []
    monkeypatch.setattr(advice.logger, "info", found.append)
    return found


def free(monkeypatch, memory: float, temporary: float = 1e15, cache: float = 1e15) -> None:
    """Let so many bytes be free."""
    for module in (advice, needs):
        monkeypatch.setattr(module, "room_of", lambda device: Room(int(memory), 10**15, int(temporary), int(cache)))


def need(job, settings, passes, left: float = 1.0) -> Need:
    (request,) = requests_of([job], settings, passes, left)
    return need_of(request)


def foresee_jobs(jobs, settings, passes, left: float = 1.0) -> Foreseen:
    return foresee(requests_of(jobs, settings, passes, left))


def refusal(*arguments) -> str:
    with pytest.raises(UserError) as refused:
        announce(foresee_jobs(*arguments))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CONFIGS, "qwen3-moe-dense-first"])
def test_every_architecture_is_probed_and_leaves_the_random_numbers_alone(case, monkeypatch):
    monkeypatch.setattr(probe, "LONG", 0)  # once is enough
    monkeypatch.setattr(probe, "ENOUGH", 0)
    model = make_model(case)
    state = torch.get_rng_state()
    sizes = model_sizes(model.config, "float32")
    passes = [*trace_parts(Settings(name="test")), *sweep_parts(schemes(*TABLE1, "llm.int8-bnb"))]
    passes += ablation_parts(Ablation(model=case, methods=["zero", "mean", "shuffle"]), model.config.hidden_size)
    passes += damage_parts(plan_damage(model, schemes("absmax", "llm.int8"), DAMAGE_BY, ()))
    passes += [[Part(partial(latency, tokens=4, repeats=1))]]
    found = find_costs(model.config, "float32", CPU, 24, passes)
    assert torch.equal(torch.get_rng_state(), state)
    if case in CONFIGS:  # all layers of which are equal
        assert sizes.weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert sizes.layers == 2
    assert [len(costs) for costs in found.parts] == [len(parts) for parts in passes]
    for cost in (cost for costs in found.parts for cost in costs):
        assert min(cost) >= 0
        assert min(cost.layer, cost.peak) > 0
    plain = found.parts[2][0]
    assert plain.added == plain.first == plain.further == 0  # perplexity keeps nothing of a layer


def test_a_model_of_one_layer_is_probed():
    config = AutoConfig.for_model("gpt2", **SMALL | {"n_layer": 1})
    ((cost,),) = find_costs(config, "float32", CPU, 128, sweep_parts(schemes("absmax"))).parts
    assert min(cost.layer, cost.peak, cost.added) > 0
    assert cost.first == cost.further == 0


def test_time_in_layers_is_of_all_passes_through_them(monkeypatch):
    """By a clock that moves by one with each layer."""
    begun, hooks = [], []

    def count(model):  # anew in each run
        while hooks:
            hooks.pop().remove()
        hooks.extend(layer.register_forward_pre_hook(lambda *_: begun.append(1)) for layer in decoder_layers(model))
        return model

    monkeypatch.setattr(probe, "_clock", lambda device: lambda: Moment(len(begun), len(begun)))
    config = AutoConfig.for_model("gpt2", **SMALL | {"n_embd": 64})
    for passes in (1, 3):
        part = Part(lambda model, ids, passes=passes: [model(ids) for _ in range(passes)], count)
        begun.clear()
        ((cost,),) = find_costs(config, "float32", CPU, 16, [[part]]).parts
        assert (cost.layer, cost.rest) == (passes, 0)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_two_layers_foretell_the_peak_of_a_generation_by_all(case):
    config = make_model(case).config
    config.num_hidden_layers, config.max_position_embeddings = 6, 64
    part = Part(partial(latency, tokens=40, repeats=1))
    ((cost,),) = find_costs(config, "float32", CPU, 8, [[part]]).parts
    model = AutoModelForCausalLM.from_config(config).eval()
    with Storages() as storages:
        part.each(model, torch.arange(8)[None])
    heads, of_keys = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    keys_and_values = 2 * 4 * (8 + 40) * config.hidden_size * of_keys // heads
    assert cost.further == pytest.approx(keys_and_values, rel=0.05)
    assert storages.peak() <= cost.peak + 5 * cost.further <= 1.2 * storages.peak()


def test_waiting_for_a_busy_processor_is_not_foreseen():
    def waits(model, ids):
        time.sleep(0.2)
        perplexity(model, ids)

    config = AutoConfig.for_model("gpt2", **SMALL | {"n_layer": 1, "n_embd": 64})
    ((cost,),) = find_costs(config, "float32", CPU, 16, [[Part(waits)]]).parts
    assert cost.layer + cost.rest < 0.1


@pytest.mark.parametrize("kind", ["fp32", "absmax", "llm.int8-zeropoint", "trace", "trace without sinks"])
def test_one_layer_foretells_the_peak_of_all(kind):
    config = AutoConfig.for_model("gpt2", **SMALL)
    passes = (
        trace_parts(Settings(name="test"), attention=kind == "trace")[:1]
        if "trace" in kind
        else sweep_parts(schemes(kind))
    )
    ((part,),) = passes
    ((cost,),) = find_costs(config, "float32", CPU, 128, passes).parts
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter[0] = 20 * (parameter[0] != 0)
    ids = torch.randint(5000, (1, 128), generator=torch.Generator().manual_seed(0))
    with Storages() as storages:
        part.each(part.once(model), ids)
    foretold = cost.peak + 4 * cost.added + 3 * cost.further
    assert foretold == pytest.approx(storages.peak(), rel=0.02)
    assert (cost.added > 0) == (kind not in ("fp32", "trace", "trace without sinks"))
    assert (cost.further > 0) == ("trace" in kind)


MEASURE = """
import sys, threading, time
import torch
from outliers.measurements.perplexity import perplexity
from outliers.models.load import load_model
from outliers.quantization.convert import quantize

def resident():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return 1024 * int(lines["RssAnon"].split()[0])

seen, over = [], threading.Event()

def look():
    while not over.wait(0.002):
        seen.append(resident())

watcher = threading.Thread(target=look)
watcher.start()
model = quantize(load_model(sys.argv[1]), "llm.int8")
perplexity(model, torch.randint(5000, (2, 128)))
over.set()
watcher.join()
print(max(seen))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident memory from /proc")
def test_memory_is_that_of_a_process(tmp_path):
    shape = {**SMALL, "n_embd": 1024, "n_head": 16, "vocab_size": 20_000}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    job = job_of(load_config(str(tmp_path)), str(tmp_path))
    foretold = need(job, Settings(name="test", block=128, blocks=2), sweep_parts(schemes("llm.int8"))).memory
    assert 0.9 * measured < foretold < 1.25 * measured + 150e6


def test_what_a_run_needs_is_counted(opt, probed, monkeypatch):
    free(monkeypatch, 1e15)
    settings, passes = Settings(name="test", blocks=8), sweep_parts(schemes("absmax", "absmax-row", "llm.int8"))
    parameters = 6_658_473_984
    outside = 4096 * (50272 + 2050 + 2)
    needed = need(opt, settings, passes, left=0.5)
    assert needed == Need("my-opt", 4 * parameters + BESIDE, 0, 0, 0, 0.5 * 3 * 8 * (1 + 32 * 0.5))
    states = 3 * 8 * 256 * 4096 * 4
    weights = 4 * (outside + (parameters - outside) // 32)
    streamed = settings.model_copy(update={"stream": True})
    assert need(opt, streamed, passes).memory == weights + BESIDE + states
    on_disk = need(opt, streamed.model_copy(update={"memory": states - 1}), passes)
    assert (on_disk.memory, on_disk.disk) == (weights + BESIDE, states)
    assert pickle.loads(pickle.dumps(on_disk)) == on_disk


def test_hidden_states_are_on_a_gpu_where_they_leave_room(opt, probed, monkeypatch):
    monkeypatch.setattr(needs, "find_device", lambda name: torch.device("cuda"))
    settings = Settings(name="test", device="cuda", blocks=100, stream=True)
    states = 100 * 256 * 4096 * 4
    outside = 4 * 4096 * (50272 + 2050 + 2)
    found = {}
    for where, memory in {"gpu": outside + 2 * states, "host": outside + 2 * states - 2}.items():
        free(monkeypatch, memory)
        found[where] = need(opt, settings, sweep_parts(schemes("fp32")))
    assert found["gpu"].memory - found["host"].memory == states
    assert found["host"].host - found["gpu"].host == states
    assert found["gpu"].host == needs.PROCESS


def test_what_is_kept_of_all_blocks_while_a_traced_model_is_streamed(opt, monkeypatch):
    cost = COST._replace(first=10, further=3, added=2)
    monkeypatch.setattr(needs, "find_costs", lambda *_: Costs([[cost]], 0.0, 0.0))
    free(monkeypatch, 1e15)
    passes = [[Part(perplexity)]]
    streamed = [need(opt, Settings(name="test", blocks=n, stream=True), passes).memory for n in (1, 5)]
    assert streamed[1] - streamed[0] == 4 * (256 * 4096 * 4 + 10)
    assert need(opt, Settings(name="test", blocks=5, stream=True, memory=5 * 256 * 4096 * 4), passes).disk == 5 * 10
    resident = [need(opt, Settings(name="test", blocks=n), passes).memory for n in (1, 5)]
    assert resident[0] == resident[1] == 4 * 6_658_473_984 + BESIDE + 32 * 2 + 31 * 3


def test_a_model_too_large_is_refused_with_what_would_help(opt, probed, monkeypatch, told):
    free(monkeypatch, 21.46e9)
    passes = sweep_parts(schemes("fp32"))
    assert refusal([opt], Settings(name="test"), passes) == (
        "'my-opt' needs 27.4 GB of memory in float32 and 21.5 GB are free; "
        "with --stream it needs 2.6 GB, with --dtype bfloat16 it needs 14.1 GB"
    )
    assert told[-1].splitlines()[-2:] == [
        "my-opt     27.4 GB        -         -  about 9 min",
        "available  21.5 GB  1000 TB",
    ]
    free(monkeypatch, 2e9)
    assert refusal([opt], Settings(name="test"), passes) == (
        "'my-opt' needs 27.4 GB of memory in float32 and 2.0 GB are free; "
        "with --stream --dtype bfloat16 it needs 1.7 GB"
    )


def test_hidden_states_too_large_are_refused_with_how_many_fit(opt, probed, monkeypatch):
    passes = sweep_parts(schemes("fp32"))
    streamed = Settings(name="test", blocks=2000, dtype="bfloat16", stream=True)
    free(monkeypatch, 3.3e9)
    # 2.1 MB a block beside 1.64 GB: 790 fit into 3.3 GB, and 1.66 GB of them beside the rest
    assert refusal([opt], streamed, passes) == (
        "'my-opt' needs 5.8 GB of memory in bfloat16 and 3.3 GB are free; "
        "with --memory 1GB it needs 1.6 GB and 4.2 GB of disk, with --blocks 790 it needs 3.3 GB"
    )
    monkeypatch.setattr(advice.tempfile, "gettempdir", lambda: "/tmp")
    free(monkeypatch, 3.3e9, temporary=1e9)
    assert refusal([opt], streamed.model_copy(update={"memory": 10**9}), passes) == (
        "'my-opt' needs 4.2 GB of disk for hidden states and 1.0 GB are free in '/tmp'; set TMPDIR to a folder with "
        "more room, with --blocks 476 it needs 2.6 GB"
    )


def test_only_options_that_a_measurement_has_are_proposed(opt, probed, monkeypatch):
    (request,) = requests_of([opt], Settings(name="test"), sweep_parts(schemes("fp32")), 1.0)
    asked = [request._replace(options=("dtype", "device"))]
    free(monkeypatch, 21.46e9)
    assert foresee(asked).refusal.endswith("21.5 GB are free; with --dtype bfloat16 it needs 14.1 GB")
    free(monkeypatch, 2e9)
    assert foresee(asked).refusal.endswith("no option makes it fit on this machine")


def test_nothing_is_probed_where_no_layer_fits(opt, monkeypatch):
    monkeypatch.setattr(needs, "find_costs", lambda *_: pytest.fail("tried"))
    free(monkeypatch, 100e6)
    assert refusal([opt], Settings(name="test"), sweep_parts(schemes("fp32"))) == (
        "'my-opt' needs at least 26.6 GB of memory in float32 and 100 MB are free; "
        "no option makes it fit on this machine"
    )


def test_downloads_are_what_the_hub_has_and_its_cache_has_not(opt, probed, monkeypatch):
    sizes = {"config.json": 7, "a.safetensors": 3 * 10**9, "b.safetensors": 2 * 10**9, "onnx/c.safetensors": 9}
    siblings = [SimpleNamespace(rfilename=name, size=count) for name, count in sizes.items()]
    hub = SimpleNamespace(model_info=lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr("outliers.models.source.HfApi", lambda: hub)
    monkeypatch.setattr(needs, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(advice, "HF_HUB_CACHE", "/cache")
    free(monkeypatch, 1e15)
    passes, jobs = sweep_parts(schemes("fp32")), [opt._replace(model="some/model")] * 2
    assert need(jobs[0], Settings(name="test"), passes).download == 5 * 10**9
    free(monkeypatch, 1e15, cache=8e9)
    assert refusal(jobs, Settings(name="test"), passes) == (
        "the models need 10.0 GB for downloads and 8.0 GB are free in '/cache'; "
        "set HF_HOME to a folder with more room, or give fewer models"
    )
    free(monkeypatch, 1e15, cache=4e9)
    assert refusal(jobs, Settings(name="test"), passes) == (
        "'some/model' needs 5.0 GB of disk for its download and 4.0 GB are free in '/cache'; "
        "set HF_HOME to a folder with more room"
    )
    del hub.model_info
    assert need(jobs[0], Settings(name="test"), passes).download is None


def test_one_calibration_serves_all_models_of_a_configuration(opt, probed, monkeypatch, told):
    free(monkeypatch, 1e15)
    found = foresee_jobs([opt, opt], Settings(name="test"), sweep_parts(schemes("fp32")))
    assert (len(found.needs), found.refusal) == (2, None)
    assert probed == [("float32", 256)]
    announce(found)
    announce(foresee_jobs([opt], Settings(name="test"), sweep_parts(schemes("fp32")), left=0))
    assert len(told) == 1


def test_the_table_adds_up_models_one_after_the_other():
    needs = [
        Need("pocket/gpt2-1.7m", 610_000_000, 0, 0, 0, 7.6),
        Need("a-folder/of-some-user/with-a-name/that-is-long", 27_100_000_000, 0, 10**9, 2 * 10**9, 9000),
    ]
    assert table(needs, Room(64 * 10**9, 1, 66_300_000_000, 10**12)).splitlines() == [
        "needs                               memory     disk  download         time",
        "---------------------------------  -------  -------  --------  -----------",
        "pocket/gpt2-1.7m                    610 MB        -         -    about 8 s",
        "…me-user/with-a-name/that-is-long  27.1 GB   3.0 GB    2.0 GB  about 2.5 h",
        "together                           27.1 GB   3.0 GB    2.0 GB  about 2.5 h",
        "available                          64.0 GB  66.3 GB",
    ]


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


def test_free_memory_is_that_of_the_machine_at_most():
    assert 0 < needs.free_memory() <= needs.psutil.virtual_memory().total


def test_the_estimate_knows_no_experiments():
    sources = [file.read_text() for file in Path(needs.__file__).parent.glob("*.py")]
    assert len(sources) > 1
    assert not any(re.search(r"outliers\.(experiment|specification|report)", source) for source in sources)


def test_parts_stand_for_all_that_is_measured():
    ((*parts,),) = sweep_parts(schemes(*TABLE1))
    assert sum(part.times for part in parts) == len(TABLE1)
    spec = Ablation(model="x", features=[1, 2], methods=["zero", "mean"])
    passes = ablation_parts(spec, 64)
    assert sum(part.times for part in passes[-1]) == len(plan([1, 2], 64, ["zero", "mean"]))
    assert len(passes) == 3  # a trace for the means, attention, perplexity
    assert len(ablation_parts(Ablation(model="x"), 64)) == 3  # a trace that finds features, attention, perplexity


def test_parts_stand_for_the_whole_damage():
    """Of a resident model a layer costs half an evaluation."""
    asked = plan_damage(make_model("llama"), schemes("absmax"), DAMAGE_BY, ())
    for streamed, layers in ((False, 2), (True, 4)):
        errors, baseline, model, roles, of_layers = damage_parts(asked, 3, streamed)
        times = [sum(part.times for part in parts) for parts in (errors, baseline, model, roles, of_layers)]
        assert times == [1, 3, 6, 3 * 8, 3 * layers]


def test_runs_of_less_than_a_second_are_not_foreseen(monkeypatch, probed, told):
    config = load_config("pocket/gpt2-0.5m")
    for blocks, foreseen in ((2, False), (64, True)):
        found = foresee_jobs([job_of(config)], Settings(name="test", blocks=blocks), sweep_parts(schemes(*TABLE1)))
        announce(found)
        assert bool(found.needs) == bool(probed) == bool(told) == foreseen


def test_a_command_prints_what_it_needs_and_refuses(monkeypatch, capsys, tmp_path):
    arguments = ["--model", "pocket/gpt2-0.1m", "--scheme", "fp32", "--blocks", "80", "--out", tmp_path / "out"]
    arguments += ["--block", "256"]
    with monkeypatch.context() as patch:
        patch.setattr(advice, "WORTH_FORESEEING", 0)
        code, _, err = call(patch, capsys, *arguments)
        assert code == 0
        assert [line.split()[0] for line in err.splitlines()] == ["needs", "-" * 16, "pocket/gpt2-0.1m", "available"]
        code, _, err = call(patch, capsys, *arguments)
        assert (code, err) == (0, "")
        free(patch, 1e6)
        code, _, err = call(patch, capsys, *arguments, "--force")
    assert code == 2
    assert err.splitlines()[-1] == (
        "error: 'pocket/gpt2-0.1m' needs 427 MB of memory in float32 and 1 MB are free; no option makes it fit on this "
        "machine"
    )


def test_an_ablation_is_foreseen_as_long_as_rows_are_missing(monkeypatch, probed, tmp_path):
    lefts = []
    monkeypatch.setattr(
        "outliers.experiment.engine.foresee", lambda asked: lefts.append(asked[0].left) or foresee(asked)
    )
    fields = {"model": "pocket/gpt2-0.1m", "block": 32, "blocks": 1, "features": [1]}
    for more in ({}, {}, {"methods": ["mean"]}, {"blocks": 2}):
        run(Ablation(**fields | more), tmp_path)
    run(Ablation(**fields), tmp_path, force=True)
    assert lefts == [1, 0, pytest.approx(22 / 24), 1, 1]
