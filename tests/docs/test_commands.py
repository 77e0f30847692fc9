"""Every program of the documentation prints the output below it. Every command runs here or in a named test."""

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
import types

import numpy as np
import pytest

from models.experiment import load
from models.export import _RankingServer
from models.serve import tensors
from models.serve.batching import sizes_of
from models.serve.loaded import Signature, Spec
from tests.docs.commands import PAGES, ROOT, commands, diffs, modules_and_flags, programs

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
CONVERT = "python -m tf_fusedrec.data.convert"
MAIN_JOB = "tests/models/test_train.py::test_two_ranks_train_evaluate_and_export"
BY_DATA = "tests/environment/test_launch_training.py::test_the_data_set_chooses_the_experiment"
CRITEO = "tests/examples/test_criteo_dlrm.py::test_two_ranks_find_the_signal_that_one_finds"
PROFILING = "tests/docs/test_profiling.py"
DEPLOY = "tests/examples/test_deploy.py"
MOVIELENS = "tests/data/test_movielens.py::test_every_form_gives_the_same"
SERVE = "tests/models/serve/test_serve.py"
TRIED = f"{SERVE}::test_the_program_where_only_tensorflow_is_installed"

# The request of docs/served_model.md.
REQUEST = {
    "user_budget": [2], "user_device": [1], "history_item": [17, 42, 8], "history_action": [1, 0, 1],
    "history_time": [1700000000, 1700000060, 1700000120], "history_row_splits": [0, 3], "exposed_item": [17, 23],
    "exposed_time": [1700000180, 1700000180], "exposed_row_splits": [0, 2],
}  # fmt: skip


def curl(body, path):
    """The command that sends `body` to the model of docs/served_model.md."""
    return f"curl -d '{json.dumps(body)}' http://127.0.0.1:8501/v1/models/grm{path}"


# Commands that run too long or need another machine, and the tests that run the same.
RUN_ELSEWHERE = {
    "make setup": "tests/environment/test_setup_env.py::test_nothing_to_do",
    "make train": "tests/environment/test_launch_training.py::test_without_data_the_default_and_a_given_config_wins",
    "make train NP=1": (
        "tests/environment/test_setup_env.py::test_training_on_one_process_needs_neither_horovod_nor_tools"
    ),
    "python -m tools.horovod_wheel": (
        "tests/environment/test_horovod_wheel.py::test_the_command_installs_the_wheel_for_the_tensorflow_here"
    ),
    "make test-on TENSORFLOW=2.21.0 PYTHON=3.12": (
        "tests/environment/test_versions.py::test_make_passes_the_pair_and_a_pair_that_cannot_be_is_named"
    ),
    "make train DATA=path/to/ml-1m": BY_DATA,
    "make train DATA=path/to/kuairand": BY_DATA,
    "make test": "tests/environment/test_commands.py::test_continuous_integration_runs_the_tests",
    "make sanitize": "tests/environment/test_sanitizers.py::test_a_sound_program_passes_and_is_compiled_once",
    "make bench": "tests/environment/test_commands.py::test_every_benchmark_of_the_list_exists",
    "make wheel": "tests/environment/test_wheel.py::test_the_installed_wheel_works_from_another_folder",
    "horovodrun -np 2 --gloo python train.py": (
        "tests/docs/test_quickstart_ranks.py::test_two_ranks_train_the_model_of_one"
    ),
    "horovodrun -np 2 --gloo python -m models.train --config configs/grm_tiny.yaml --set train.epochs=2 "
    "--output runs/mine": (
        MAIN_JOB
    ),
    "horovodrun -np 2 python -m models.train --config configs/hstu_ml1m_tiny.yaml --data path/to/ml-1m": (
        MAIN_JOB
    ),
    "horovodrun -np 16 -H host1:8,host2:8 --network-interfaces eth0 --gloo python train.py": (
        "tests/exchange/test_two_hosts.py::test_training_over_two_hosts_equals_training_on_one"
    ),
    "python examples/criteo_dlrm.py --data path/to/train.txt": CRITEO,
    "horovodrun -np 2 --gloo python examples/criteo_dlrm.py --data path/to/train.txt": CRITEO,
    "python -m models.evaluate runs/grm_tiny --json metrics.json": MAIN_JOB,
    "horovodrun -np 2 --gloo python -m models.evaluate runs/hstu_ml1m_tiny --data path/to/ml-1m": MAIN_JOB,
    "python -m models.compare runs/mine runs/grm_tiny": (
        "tests/models/test_compare.py::test_pairs_do_not_depend_on_the_order_of_rows_and_the_table_tells"
    ),
    "python -m models.export --checkpoint runs/grm_tiny/checkpoint --output runs/grm_tiny/served": (
        "tests/models/test_export.py::test_a_checkpoint_of_something_else_is_refused"
    ),
    "python -m models.export --checkpoint runs/retrieval/checkpoint --output runs/retrieval/served --index_share 0.1": (
        "tests/models/test_export.py::test_an_index_is_part_of_the_version"
    ),
    "saved_model_cli show --dir runs/a/saved_model --tag_set serve --signature_def serving_default": (
        "tests/saved_model/test_loaders.py::test_loader"
    ),
    "saved_model_cli run --dir runs/a/saved_model --tag_set serve --signature_def serving_default --input_exprs "
    "'history=np.array([3, 5]);history_row_splits=np.array([0, 2])'": (
        "tests/saved_model/test_loaders.py::test_loader"
    ),
    "python -m pytest -q tests/ops/test_segment_unique.py tests/test_architecture.py": (
        "tests/ops/test_segment_unique.py::test_edge_cases"
    ),
    "python -m pytest -q tests/optimizers/test_optimizers.py tests/embedding/test_native_optimizers.py": (
        "tests/optimizers/test_optimizers.py::test_a_record_gives_rule_hyperparameters_and_slots"
    ),
    "python -m pytest -q tests/embedding/test_capacity.py tests/ops/hash_table/test_hash_table.py": (
        "tests/embedding/test_capacity.py::test_rows_are_those_of_a_dict_after_every_step"
    ),
    "python -m pytest -q tests/data/test_sequences.py tests/data/test_convert.py": (
        "tests/data/test_sequences.py::test_sequences_keep_their_order"
    ),
    "docker build -f examples/deploy/cpu.Dockerfile -t tf_fusedrec .": f"{DEPLOY}::test_hadolint_finds_nothing",
    "docker build -f examples/deploy/gpu.Dockerfile -t tf_fusedrec:gpu .": f"{DEPLOY}::test_hadolint_finds_nothing",
    "docker run --rm tf_fusedrec": "tests/environment/test_doctor.py::test_the_whole_report_of_a_sound_installation",
    "sbatch examples/deploy/slurm.sh python -m models.train --config configs/grm_4g.yaml": (
        f"{DEPLOY}::test_the_slurm_script_starts_ranks"
    ),
    "kubectl apply -f examples/deploy/mpijob.yaml": f"{DEPLOY}::test_the_kubernetes_job_starts_its_ranks",
    "python -m tools.debian_root examples/deploy/cpu.Dockerfile": (
        f"{DEPLOY}::test_steps_that_a_debian_root_cannot_run_are_refused"
    ),
    "python -m tools.first_step --np 1": (
        "tests/environment/test_first_step.py::test_an_end_before_the_first_step_is_an_error"
    ),
    "python -m tests.gpu.session": "tests/benchmarks/test_gpu.py::test_the_session_knows_every_op_and_benchmark",
    "python -m tests.gpu.tensorflow_session": (
        "tests/gpu/test_tensorflow_session.py::test_an_exit_code_of_2_and_the_missing_thing_without_a_gpu"
    ),
    "python -m benchmarks.train_step --quick --json train_step.json": (
        "tests/benchmarks/test_train_step.py::test_summary_has_the_fields_that_the_readme_names"
    ),
    "pgrep -f '^[^ ]*python[^ ]* -m models.train'": f"{PROFILING}::test_the_processes_of_the_ranks_are_found",
    "top -H -b -w 120 -d 10 -n 2 -p $PID": f"{PROFILING}::test_top_lists_it",
    "timeout -s INT 10 strace -c -f -o syscalls.txt -p $PID": f"{PROFILING}::test_strace_counts_its_calls",
    "perf record -F 99 -g -o rank.perf -p $PID -- sleep 10": f"{PROFILING}::test_perf_names_its_function",
    "perf report --stdio --no-children -g none --sort pid,dso,symbol -i rank.perf": (
        f"{PROFILING}::test_perf_names_its_function"
    ),
    "python -m benchmarks.segment_unique --quick --json segment_unique.json": (
        "tests/benchmarks/test_op_benchmarks.py::test_quick_run_writes_its_cases"
    ),
    "python -m benchmarks.overlap --quick --json overlap.json": (
        "tests/benchmarks/overlap/test_overlap.py::test_a_tiny_run"
    ),
    "python -m benchmarks.horovod_queue --json queue.json": (
        "tests/benchmarks/test_horovod_queue.py::test_a_step_is_charged_with_its_splits"
    ),
    "python -m benchmarks.schedule_quality --run runs/schedule_quality --json quality.json": (
        "tests/benchmarks/schedule_quality/test_schedule_quality.py::test_jobs_are_trained_once_and_compared_with_sync_of_the_same_seeds"
    ),
    "python -m benchmarks.serving --quick --json serving.json": "tests/benchmarks/test_serving.py::test_fields",
    "pip install -r requirements/serve.txt": (
        "tests/environment/test_commands.py::test_the_metadata_ask_for_the_pinned_versions"
    ),
    "mkdir -p runs/grm_tiny/served runs/grm_tiny/deltas": TRIED,
    "cp -r runs/grm_tiny/saved_model runs/grm_tiny/served/1": TRIED,
    "python -m models.serve --export runs/grm_tiny/served/1 --deltas runs/grm_tiny/deltas --model_name grm": TRIED,
    curl({"inputs": REQUEST}, ":predict"): (
        "tests/docs/test_commands.py::test_the_request_has_the_inputs_of_the_main_job"
    ),
    curl({"inputs": {"user_budget": [2]}}, "/versions/2:predict"): (
        f"{SERVE}::test_bad_requests_get_the_codes_of_tensorflow_serving"
    ),
    "curl http://127.0.0.1:8501/monitoring/prometheus/metrics": (
        f"{SERVE}::test_answers_are_those_of_the_model_also_of_joined_requests"
    ),
    "python -m models.train --config configs/grm_tiny.yaml --set train.epochs=15 --resume": (
        "tests/models/test_train.py::test_interrupted_jobs_save_on_all_ranks_and_go_on"
    ),
    "python -m models.export --checkpoint runs/grm_tiny/checkpoint --base runs/grm_tiny/served/1 "
    "--output runs/grm_tiny/deltas/1-to-2": (
        "tests/models/test_kept_states.py::test_a_delta_makes_states_of_the_older_version_unreachable"
    ),
    'docker run --rm -p 8501:8501 -v "$PWD/runs/grm_tiny/served:/models/grm" -v "$PWD/runs/grm_tiny/deltas:/deltas" '
    "-e MODEL_NAME=grm tensorflow/serving:2.16.1": (
        "tests/saved_model/test_loaders.py::test_loader"
    ),
    curl({"signature_name": "apply_delta", "inputs": {"path": "/deltas/1-to-2"}}, ":predict"): (
        f"{SERVE}::test_bad_requests_get_the_codes_of_tensorflow_serving"
    ),
    "python -m tests.saved_model.hour --deltas 360": (
        "tests/saved_model/test_updates.py::test_four_threads_see_whole_versions_where_only_tensorflow_is"
    ),
    "python -m benchmarks.tfra_swap --quick --json swap.json": (
        "tests/benchmarks/test_tfra_swap.py::test_both_models_train_alike_and_take_turns"
    ),
    "python -m benchmarks.scale --quick --json scale.json": (
        "tests/benchmarks/test_scale.py::test_own_table_and_json"
    ),
    f"{CONVERT} movielens --input ml-1m --output data/ml-1m": MOVIELENS,
    f"{CONVERT} movielens_ranking --input ml-1m --output data/ml-1m-ranking --held_out validation": (
        "tests/models/test_prepare.py::test_validation_and_test_of_movielens_as_ranking_are_two_folders"
    ),
    "make train DATA=shop CONFIG=shop.yaml NP=1": (
        "tests/models/test_table_job.py::test_the_shop_of_the_docs_trains_with_its_own_column_names"
    ),
    f"{CONVERT} sequences --input sequences.txt --output data/sequences": (
        "tests/data/test_convert.py::test_makes_a_data_set_and_says_so"
    ),
    f"{CONVERT} kuairand --input log.csv.gz --output data/kuairand --test_fraction 0.2 --split user": (
        "tests/data/test_kuairand.py::test_split_by_hand"
    ),
    "pip install --no-build-isolation '.[tfra]'": (
        "tests/environment/test_wheel.py::test_a_model_trains_where_there_is_only_what_the_wheel_declares"
    ),
    "python -m tf_fusedrec.doctor": (
        "tests/environment/test_doctor.py::test_the_whole_report_of_a_sound_installation"
    ),
    "FUSEDREC_CUDA=1 pip install --no-build-isolation .": (
        "tests/environment/test_cuda_build.py::test_cuda_that_is_wanted_and_not_there_is_an_error_with_its_remedy"
    ),
}  # fmt: skip
# These install a cluster with GPUs. Without such a cluster, only the pinned versions are tested.
ONLY_ON_GPUS = (
    "pip install 'tensorflow[and-cuda]==2.16.2'",
    "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 "
    "HOROVOD_WITHOUT_MPI=1 HOROVOD_GPU_OPERATIONS=NCCL pip install --no-build-isolation horovod==0.28.1",
)
RUN_HERE = ("python -m tf_fusedrec.data.convert synthetic-", "python -m benchmarks.plots")
SHOWN = sorted({command for page in PAGES for command in commands(page)})


@pytest.mark.parametrize("page", [page for page in PAGES if diffs(page)], ids=lambda page: page.stem)
def test_the_diffs_of_a_page_import_what_they_call(page):
    for added, after in diffs(page):
        names = {}
        for statement in ast.parse(after).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                exec(ast.unparse(statement), names)
        bound = {
            node.id
            for node in ast.walk(ast.parse(after))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(ast.parse(added)):
            if isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node).split(".")[0] not in bound:
                eval(ast.unparse(node), names)


def test_versions_for_gpus_are_pinned():
    pins = "".join((ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8") for name in ("runtime", "horovod"))
    for command in ONLY_ON_GPUS:
        name, version = re.search(r"([a-z]+)(?:\[and-cuda\])?==([\d.]+)", command).groups()
        assert f"\n{name}=={version}\n" in pins, command


def page_name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES[1:] if programs(page)], ids=page_name)
def test_programs_print_what_is_written_below_them(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for program in programs(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program.code, page.name, "exec"), names)
        assert printed.getvalue() == program.output


def test_the_request_has_the_inputs_of_the_main_job():
    config = load(ROOT / "configs/grm_tiny.yaml", []).model
    signatures = _RankingServer(types.SimpleNamespace(config=config)).signatures()
    request = tensors.parse(json.dumps({"inputs": REQUEST}).encode(), {
        "serving_default": Signature({
            name: Spec(np.dtype(spec.dtype.as_numpy_dtype), tuple(spec.shape))
            for name, spec in signatures["serving_default"].inputs.items()
        }, {})
    })  # fmt: skip
    sizes = sizes_of(request.inputs)
    for role in ("history", "exposed"):
        assert sizes[f"{role}_row_splits end"] == sizes[f"{role}_item"] == sizes[f"{role}_time"]
        assert sizes[f"{role}_row_splits"] == sizes["user_budget"]


def test_every_command_is_run_here_or_by_a_test_that_is_there():
    listed = {*RUN_ELSEWHERE, *ONLY_ON_GPUS}
    unknown = [command for command in SHOWN if command not in listed and not command.startswith(RUN_HERE)]
    assert not unknown, "name the test that runs it, or run it here"
    assert not listed - set(SHOWN), "no page shows these any more"
    for where in RUN_ELSEWHERE.values():
        path, _, test = where.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), where


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith(RUN_HERE)])
def test_cheap_commands_end_well(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[2:]
    monkeypatch.setattr(sys, "argv", words)
    for imported in (words[0], f"{words[0]}.__main__"):  # A command begins without its module.
        monkeypatch.delitem(sys.modules, imported, raising=False)
    runpy.run_module(words[0], run_name="__main__")
    assert any(path.is_file() for path in tmp_path.rglob("*")), "it wrote nothing"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_modules_and_their_flags_exist(page):
    for module, flags in modules_and_flags(page):
        if module in ("pytest", "mkdocs") or module == "benchmarks.":  # modules of others, and "benchmarks.<op>"
            continue
        path = ROOT / module.replace(".", "/")
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
        text = source.read_text(encoding="utf-8")
        known = {f"--{name}" for name in re.findall(r'(?:add_argument\(\s*"--|DEFINE_\w+\(\s*")([\w-]+)"', text)}
        if "harness.parse_arguments" in text:
            known |= {"--quick", "--json"}
        assert set(flags) <= known, f"{module} has {sorted(known)}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    shown = " ".join([*commands(page), *re.findall(r"`(make [^`\n]*)`", text)])
    assert set(re.findall(r"\bmake ([a-z-]+)", shown)) <= TARGETS


def test_targets_of_the_readmes_links_exist():
    links = re.findall(r"\]\(((?!https?:)[^)#]+)\)", PAGES[0].read_text(encoding="utf-8"))
    assert links and all((ROOT / link).exists() for link in links)
