"""sordino beside other libraries: what each has, ε for the same run, the time of a private step, conformance.

Every library has an environment of its own below benchmarks/.cache/libraries, made here by pip when it is missing; the
two on torch use the torch of this environment. What is asked is a short script that runs there (`SCRIPTS`), and a list
of names that are looked up there (`PROBES`): a feature counts when a name of the library's documentation for it can be
imported. Nothing is filled in by hand: a library that could not be installed or whose script failed says so.

    ./run bench libraries                          all libraries; writes benchmarks/results/libraries.json and the page
    ./run bench libraries --only opacus jax-privacy
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps.clock import machine

ROOT = Path(__file__).parents[1]
CACHE = Path(__file__).parent / ".cache/libraries"
RESULTS = Path(__file__).parent / "results/libraries.json"
PAGE = ROOT / "docs/comparison.md"
_BEGIN, _END = "<!-- libraries: begin -->", "<!-- libraries: end -->"
_SECONDS = 900


@dataclass(frozen=True)
class Library:
    """A library, what pip installs for it, and whether it uses this environment's torch."""

    name: str
    packages: tuple[str, ...]
    version_of: str
    shares_torch: bool = False


LIBRARIES = (
    Library("sordino", (), "sordino", shares_torch=True),
    Library("Opacus", ("opacus==1.6.0",), "opacus", shares_torch=True),
    Library("opake", ("opake==0.16.1", "opake-dpftrl==0.16.1", "opake-auditing==0.16.1"), "opake", shares_torch=True),
    Library("JAX-Privacy", ("jax-privacy==2.0.0",), "jax-privacy"),
    Library(
        "TF-Privacy",
        ("tensorflow-privacy==0.9.0", "tensorflow==2.15.1", "tensorflow-probability<0.24"),
        "tensorflow-privacy",
    ),
    Library("diffprivlib", ("diffprivlib==0.6.6", "scikit-learn<1.6"), "diffprivlib"),
    Library("dp-accounting", ("dp-accounting==0.6.0",), "dp-accounting"),
)

# feature → library → names, any of which shows that the library has it.
PROBES: dict[str, dict[str, tuple[str, ...]]] = {
    "DP-SGD training": {
        "sordino": ("sordino.PrivacyEngine",),
        "Opacus": ("opacus.PrivacyEngine",),
        "opake": ("opake.dpsgd.clipped_grad",),
        "JAX-Privacy": ("jax_privacy.clipped_grad",),
        "TF-Privacy": ("tensorflow_privacy.DPSequential",),
    },
    "norms without per-record gradients (ghost clipping)": {
        "sordino": ("sordino.PerformanceOptions",),
        "Opacus": ("opacus.grad_sample.GradSampleModuleFastGradientClipping",),
        "TF-Privacy": ("tensorflow_privacy.privacy.fast_gradient_clipping.clip_grads",),
    },
    "clipping norm that adapts": {
        "sordino": ("sordino.clipping.QuantileClipping",),
        "Opacus": ("opacus.optimizers.AdaClipDPOptimizer",),
        "opake": ("opake.dpsgd.clipping.adaptive_clipped_grad",),
        "TF-Privacy": ("tensorflow_privacy.QuantileAdaptiveClipSumQuery",),
    },
    "training over several devices": {
        "sordino": ("sordino.training.sharded",),
        "Opacus": ("opacus.distributed.DifferentiallyPrivateDistributedDataParallel",),
        "opake": ("opake.distributed",),
        "JAX-Privacy": ("jax_privacy.sharding_utils",),
    },
    "models of JAX or Keras": {
        "JAX-Privacy": ("jax_privacy.keras_api", "jax_privacy.clipped_grad"),
        "TF-Privacy": ("tensorflow_privacy.DPSequential",),
    },
    "own kernels for language models on graphics cards": {"opake": ("opake.patches",)},
    "noise correlated over steps (DP-FTRL, matrix factorization)": {
        "sordino": ("sordino.mechanisms.correlated",),
        "opake": ("opake.dpftrl.mf_gaussian_noise",),
        "JAX-Privacy": ("jax_privacy.matrix_factorization",),
        "TF-Privacy": (
            "tensorflow_privacy.DPFTRLTreeAggregationOptimizer",
            "tensorflow_privacy.TreeCumulativeSumQuery",
        ),
    },
    "discrete or secure noise in training": {
        "sordino": ("sordino.mechanisms.integer_noise",),
        "Opacus": ("opacus.optimizers.optimizer._generate_noise",),
        "TF-Privacy": ("tensorflow_privacy.DistributedDiscreteGaussianSumQuery",),
    },
    "accountant by privacy loss distributions": {
        "sordino": ("sordino.accounting.epsilon",),
        "Opacus": ("opacus.accountants.PRVAccountant",),
        "opake": ("opake.accounting",),
        "JAX-Privacy": ("dp_accounting.pld",),
        "TF-Privacy": ("dp_accounting.pld",),
        "dp-accounting": ("dp_accounting.pld.PLDAccountant",),
    },
    "privacy filters for adaptive budgets": {
        "sordino": ("sordino.accounting.GDPFilter",),
    },
    "budget across uses of a dataset (ledger)": {
        "sordino": ("sordino.ledger",),
        "diffprivlib": ("diffprivlib.BudgetAccountant",),
    },
    "estimators with scikit-learn's interface": {
        "sordino": ("sordino.estimators.LogisticRegression",),
        "diffprivlib": ("diffprivlib.models.LogisticRegression",),
        "TF-Privacy": ("tensorflow_privacy.DNNClassifier",),
    },
    "private means, quantiles, histograms": {
        "sordino": ("sordino.mechanisms.PrivateCount",),
        "diffprivlib": ("diffprivlib.tools.quantile",),
        "TF-Privacy": ("tensorflow_privacy.QuantileEstimatorQuery",),
    },
    "synthetic tables": {"sordino": ("sordino.synthesis.TableSynthesizer",)},
    "private choice of settings": {"sordino": ("sordino.tuning.tune",)},
    "audits and membership attacks": {
        "sordino": ("sordino.audit.audit_training",),
        "opake": ("opake.auditing.one_run",),
        "JAX-Privacy": ("jax_privacy.auditing",),
        "TF-Privacy": ("tensorflow_privacy.privacy.membership_inference_attack",),
    },
    "federated learning, client-level privacy": {
        "sordino": ("sordino.federated.PrivateServer",),
    },
    "report for the person who decides": {"sordino": ("sordino.report.build_report",)},
}

PROBE_SCRIPT = """
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        except Exception:
            # It is there, and cannot be imported on this Python.
            found[name] = True
            break
        try:
            for part in parts[cut:]:
                value = getattr(value, part)
        except AttributeError:
            continue
        found[name] = True
        break
print(json.dumps(found))
"""

# ε of 1000 Poisson steps: q = 0.01, noise multiplier 1, δ = 1e-5, add or remove one.
Q, SIGMA, STEPS, DELTA = 0.01, 1.0, 1000, 1e-5
EPSILON: dict[str, str] = {
    "sordino": """
        from sordino.accounting import epsilon
        from sordino.events import Gaussian, PoissonSampled, SelfComposed
        event = SelfComposed(event=PoissonSampled(sample_rate=Q, event=Gaussian(noise_multiplier=SIGMA)), count=STEPS)
        result = {"default": epsilon(event, delta=DELTA).upper}
    """,
    "Opacus": """
        from opacus.accountants import create_accountant
        result = {}
        for kind in ("prv", "rdp"):
            accountant = create_accountant(mechanism=kind)
            accountant.history = [(SIGMA, Q, STEPS)]
            result[kind] = accountant.get_epsilon(delta=DELTA)
    """,
    "dp-accounting": """
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, pld, rdp
        event = SelfComposedDpEvent(PoissonSampledDpEvent(Q, GaussianDpEvent(SIGMA)), STEPS)
        result = {}
        for name, accountant in (("pld", pld.PLDAccountant()), ("rdp", rdp.RdpAccountant())):
            result[name] = accountant.compose(event).get_epsilon(DELTA)
    """,
    "JAX-Privacy": """
        from jax_privacy.accounting import DpParams, DpsgdTrainingAccountant, PldAccountantConfig, RdpAccountantConfig
        run = DpParams(noise_multipliers=SIGMA, num_samples=10_000, delta=DELTA, batch_size=int(10_000 * Q))
        result = {
            name: float(DpsgdTrainingAccountant(config()).compute_epsilon(STEPS, run))
            for name, config in (("pld", PldAccountantConfig), ("rdp", RdpAccountantConfig))
        }
    """,
    "TF-Privacy": """
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, rdp
        event = SelfComposedDpEvent(PoissonSampledDpEvent(Q, GaussianDpEvent(SIGMA)), STEPS)
        result = {"rdp": rdp.RdpAccountant().compose(event).get_epsilon(DELTA)}
    """,
    "opake": """
        # The compiled accountant itself: `opake.accounting` cannot be imported on every Python 3.11.
        import importlib.util, pathlib
        core = importlib.util.find_spec("opake.api.accounting.core").submodule_search_locations
        path = next(pathlib.Path(next(iter(core))).glob("opake_accounting*.so"))
        spec = importlib.util.spec_from_file_location("opake_accounting", path)
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        config = native.DiscretizationConfig()
        step = native.poisson_pld(native.gaussian_pld(SIGMA, config), Q)
        result = {"pld": float(step.self_compose(STEPS).epsilon_at(DELTA))}
    """,
}

# The time of a private step and of a plain one in the same framework: an MLP 784–256–10 in float32, 256 records a
# batch, one thread, processor time (which other work on the machine hardly changes), the smallest median of 5 groups of
# steps. Each library in its fastest documented mode that fits the model. The ratio is the price of privacy there.
SPEED: dict[str, str] = {
    "sordino": """
        import torch
        from sordino import PrivacyEngine
        def private(model, optimizer, loader):
            return PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader,
                                                noise_multiplier=1.0, max_grad_norm=1.0)
        result = torch_times(private)
    """,
    "Opacus": """
        from opacus import PrivacyEngine
        def private(model, optimizer, loader):
            return PrivacyEngine(accountant="rdp").make_private(module=model, optimizer=optimizer, data_loader=loader,
                                                noise_multiplier=1.0, max_grad_norm=1.0)
        def ghost(model, optimizer, loader):
            model, optimizer, criterion, loader = PrivacyEngine(accountant="rdp").make_private(
                module=model, optimizer=optimizer, data_loader=loader, criterion=torch.nn.CrossEntropyLoss(),
                noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost")
            return model, optimizer, loader, criterion
        # Per-record gradients by hooks, and ghost clipping: the faster one counts.
        import torch
        result = torch_times(private)
        result["private_ms"] = min(result["private_ms"], torch_times(ghost)["private_ms"])
    """,
    "opake": """
        import torch
        from opake.dpsgd import clipped_grad, gaussian_noise
        from opake.random import key
        torch.set_num_threads(1)
        torch.manual_seed(0)
        X, Y = torch.randn(256, 784), torch.randint(10, (256,))
        params = {"a": torch.randn(784, 256) * 0.03, "b": torch.zeros(256), "c": torch.randn(256, 10) * 0.06,
                  "d": torch.zeros(10)}
        def loss(params, x, y):
            logits = torch.tanh(x @ params["a"] + params["b"]) @ params["c"] + params["d"]
            return torch.nn.functional.cross_entropy(logits.reshape(-1, 10), y.reshape(-1))
        def private(size):
            gradient, clip_state = clipped_grad(loss, clipping_norm=1.0, batch_argnums=(1, 2), normalize_by=256,
                                                microbatch_size=size)
            noise, noise_state = gaussian_noise(noise_multiplier=1.0, key=key(1))
            def step():
                nonlocal clip_state, noise_state
                global params
                found, clip_state = gradient(params, X, Y, state=clip_state)
                noisy, noise_state = noise(found, noise_state)
                params = {n: params[n] - 0.1 * noisy.pytree[n] for n in params}
            return seconds(step, steps=3)
        plain_gradient = torch.func.grad(loss)
        def plain():
            global params
            found = plain_gradient(params, X, Y)
            params = {n: params[n] - 0.1 * found[n] for n in params}
        # The best size of a microbatch counts; None is the whole batch, where its documentation begins.
        result = {"private_ms": min(private(size) for size in (None, 1, 8, 32, 128)), "plain_ms": seconds(plain)}
    """,
    "JAX-Privacy": """
        import jax, jax.numpy as jnp, numpy as np, time
        import jax_privacy
        rng = np.random.default_rng(0)
        X, Y = jnp.asarray(rng.normal(size=(256, 784)), jnp.float32), jnp.asarray(rng.integers(10, size=256))
        params = {"a": jnp.asarray(rng.normal(size=(784, 256)) * 0.03, jnp.float32), "b": jnp.zeros(256),
                  "c": jnp.asarray(rng.normal(size=(256, 10)) * 0.06, jnp.float32), "d": jnp.zeros(10)}
        def loss(params, x, y):
            logits = jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] + params["d"]
            return -jax.nn.log_softmax(logits)[..., jnp.arange(len(y)), y].mean()
        def private(size):
            clipped = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=size)
            @jax.jit
            def step(params, key):
                grads = clipped(params, X, Y)
                keys = jax.random.split(key, 4)
                return {n: params[n] - 0.1 * (grads[n] + jax.random.normal(k, params[n].shape)) / 256
                        for n, k in zip(sorted(params), keys)}
            return step
        @jax.jit
        def plain(params, key):
            grads = jax.grad(loss)(params, X, Y)
            return {n: params[n] - 0.1 * grads[n] for n in params}
        def clock(step):
            p, key = params, jax.random.key(0)
            def go():
                nonlocal p, key
                key, used = jax.random.split(key)
                p = jax.block_until_ready(step(p, used))
            return seconds(go)
        # The best size of a microbatch counts; None is the whole batch.
        result = {"private_ms": min(clock(private(size)) for size in (None, 1, 4, 16, 64)), "plain_ms": clock(plain)}
    """,
    "TF-Privacy": """
        import numpy as np, tensorflow as tf
        import tensorflow_privacy as tfp
        from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        rng = np.random.default_rng(0)
        X, Y = tf.constant(rng.normal(size=(256, 784)), tf.float32), tf.constant(rng.integers(10, size=256))
        def layers():
            return [tf.keras.layers.Dense(256, activation="tanh", input_shape=(784,)), tf.keras.layers.Dense(10)]
        def clock(model, **options):
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss=loss, **options)
            return seconds(lambda: model.train_on_batch(X, Y))
        # Norms by its fast gradient clipping, which has rules for Dense and Embedding; on both sides the faster of with
        # and without XLA.
        rules = layer_registry.make_default_layer_registry()
        result = {
            "private_ms": min(
                clock(tfp.DPSequential(l2_norm_clip=1.0, noise_multiplier=1.0, use_xla=xla, layer_registry=rules,
                                       layers=layers()))
                for xla in (False, True)),
            "plain_ms": min(clock(tf.keras.Sequential(layers()), jit_compile=xla) for xla in (False, True)),
        }
    """,
}

COMMON = """
import json, os, statistics, sys, time
Q, SIGMA, STEPS, DELTA = {constants}
def seconds(go, groups=5, steps=10):
    for _ in range(3):
        go()
    found = []
    for _ in range(groups):
        times = []
        for _ in range(steps):
            started = time.process_time(); go(); times.append(time.process_time() - started)
        found.append(statistics.median(times))
    return 1000 * min(found)
def torch_times(private):
    import torch, warnings
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from torch.utils.data import DataLoader, TensorDataset
    data = TensorDataset(torch.randn(2560, 784), torch.randint(10, (2560,)))
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.Tanh(), torch.nn.Linear(256, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=256)
    def clock(model, optimizer, loader, criterion=torch.nn.functional.cross_entropy):
        def batches():
            while True:
                yield from loader
        stream = batches()
        spent = []
        def go():
            x, y = next(stream)
            started = time.process_time()
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            spent.append(time.process_time() - started)
        for _ in range(5):
            go()
        spent.clear()
        groups = []
        for _ in range(5):
            spent.clear()
            for _ in range(10):
                go()
            groups.append(statistics.median(spent))
        return 1000 * min(groups)
    return {{"private_ms": clock(*private(*build())), "plain_ms": clock(*build())}}
"""


def interpreter(library: Library) -> Path:
    """The Python of the library's environment; it is made when it is missing.

    Raises:
        RuntimeError: pip could not install the library; the message has its last line.
    """
    if not library.packages:
        return Path(sys.executable)
    folder = CACHE / library.version_of
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        if library.shares_torch:
            site = next((folder / "lib").glob("python*/site-packages"))
            (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *library.packages], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"not installed: {done.stderr.strip().splitlines()[-1][:200]}")
        (folder / "installed").touch()
    return python


def ask(python: Path, code: str, *arguments: str) -> Any:
    """What a script prints last, as JSON.

    Raises:
        RuntimeError: the script failed or took too long; the message has its last line.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
                   "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}  # fmt: skip
    try:
        done = subprocess.run(
            [python, "-c", code, *arguments],
            env=environment, capture_output=True, text=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took more than {_SECONDS} s") from error
    if done.returncode:
        # Without what follows in parentheses: paths of this machine.
        raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1].partition(" (")[0][:200])
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(library: Library, times: dict[str, Any] | None = None) -> dict[str, Any]:
    """All that is asked of one library; `times` are those of an earlier run, if they are to stay."""
    python = interpreter(library)
    version = f"from importlib.metadata import version; import json; print(json.dumps(version({library.version_of!r})))"
    found: dict[str, Any] = {"version": ask(python, version), "features": {}}
    names = {name for feature in PROBES.values() for name in feature.get(library.name, ())}
    present = ask(python, PROBE_SCRIPT, json.dumps(sorted(names)))
    for feature, libraries in PROBES.items():
        found["features"][feature] = next((name for name in libraries.get(library.name, ()) if name in present), None)
    common = COMMON.format(constants=(Q, SIGMA, STEPS, DELTA))
    for task, scripts in (("epsilon", EPSILON), ("speed", SPEED)):
        if task == "speed" and times is not None:
            found[task] = times
        elif library.name in scripts:
            code = common + textwrap.dedent(scripts[library.name]) + "\nprint(json.dumps(result))\n"
            try:
                found[task] = ask(python, code)
            except RuntimeError as error:
                found[task] = {"failed": str(error)}
    return found


def _cell(value: str | None) -> str:
    return f"`{value}`" if value else "–"


def _epsilon(found: dict[str, Any]) -> str:
    if "failed" in found.get("epsilon", {}):
        return f"not measured: {found['epsilon']['failed']}"
    if not found.get("epsilon"):
        return "–"
    return "; ".join(f"{value:.5f} ({name})" for name, value in found["epsilon"].items())


def _speed(found: dict[str, Any]) -> str:
    times = found.get("speed")
    if not times:
        return "–"
    if "failed" in times:
        return f"not measured: {times['failed']}"
    private, plain = times["private_ms"], times["plain_ms"]
    return f"{private / plain:.1f} times ({private:.1f} ms over {plain:.1f} ms)"


def tables(results: dict[str, Any], conformance: dict[str, Any]) -> str:
    """The tables of the page."""
    libraries = results["libraries"]
    names = list(libraries)
    head = "| | " + " | ".join(
        f"{name} {libraries[name].get('version', '')}".strip() for name in names
    ) + " |\n|---|" + "---|" * len(names) + "\n"  # fmt: skip
    rows = ""
    for feature in PROBES:
        cells = [
            _cell(found["features"].get(feature)) if "features" in found else "not installed"
            for found in libraries.values()
        ]
        rows += f"| {feature} | " + " | ".join(cells) + " |\n"
    passed: dict[str, str] = {}
    for name in ("sordino", "Opacus"):
        # "–" is a case that the library does not offer.
        offered = [case[name] for case in conformance["found"].values() if case.get(name, {}).get("found", "–") != "–"]
        passed[name] = f"{sum(case['passed'] for case in offered)} of {len(offered)}"
    measured = (
        "| library | ε of the run | a private step over a plain one | conformance cases passed |\n|---|---|---|---|\n"
    )
    for name, found in libraries.items():
        if "failed" in found:
            measured += f"| {name} | {found['failed']} | | |\n"
            continue
        right = passed.get(name, "not asked: no adapter")
        if "DP-SGD training" in found["features"] and not found["features"]["DP-SGD training"]:
            right = "– (no training)"
        measured += f"| {name} {found['version']} | {_epsilon(found)} | {_speed(found)} | {right} |\n"
    state = results["machine"]
    where = (
        f"Measured {state['date'][:10]} on {state['processor']}, one of two shared cores, load {state['load']}; Python "
        f"{state['python']}, torch {state['torch']}. The load changed between libraries, so read ratios, not times.\n"
    )
    return f"{where}\n{measured}\n## What each has\n\n{head}{rows}"


def main(arguments: list[str] | None = None) -> None:
    """Ask the libraries and write results and page."""
    parser = argparse.ArgumentParser(description="sordino beside other libraries.")
    parser.add_argument("--only", nargs="+", help="names of libraries; the results of the others stay")
    parser.add_argument("--keep-speed", action="store_true", help="leave the times of an earlier run as they are")
    parser.add_argument("--page", action="store_true", help="only write the page from the results that are there")
    chosen = parser.parse_args(arguments)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"libraries": {}}
    if not chosen.page:
        kept["machine"] = machine()
    for library in LIBRARIES:
        if chosen.page or (chosen.only and library.name not in chosen.only):
            continue
        earlier = kept["libraries"].get(library.name, {}).get("speed")
        try:
            kept["libraries"][library.name] = measure(library, earlier if chosen.keep_speed else None)
        except RuntimeError as error:
            kept["libraries"][library.name] = {"failed": str(error)}
        print(library.name, json.dumps(kept["libraries"][library.name], indent=1), flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    kept["libraries"] = {
        entry.name: kept["libraries"][entry.name] for entry in LIBRARIES if entry.name in kept["libraries"]
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    conformance = json.loads((RESULTS.parent / "conformance.json").read_text())
    PAGE.write_text(f"{before}{_BEGIN}\n\n{tables(kept, conformance)}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
