"""Imports point one way: sink -> deltawriters -> changelog. The layers below run where there is no Spark and no JVM.
What differs between the versions of Spark stands in one module.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("changelog", "deltawriters", "sink")


def imports_of(package: str) -> set[str]:
    """Top-level packages that any module of `package` imports, also inside functions."""
    found = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                found.add(str(node.module).split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "above"),
    [("changelog", {"deltawriters", "sink"}), ("deltawriters", {"sink", "pyspark", "py4j"})],
)
def test_a_package_imports_only_what_is_below_it(package: str, above: set[str]) -> None:
    assert not imports_of(package) & above


def imported_by(module: str) -> set[str]:
    """Top-level packages that are imported with it."""
    # in an interpreter of its own: here other tests may have imported everything
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_writers_know_no_table_format() -> None:
    """PyIceberg is there for storage, and for nothing of Iceberg."""
    found = set()
    for file in (ROOT / "deltawriters").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {name for name in names if name.startswith(("pyiceberg", "delta"))}
    assert {name for name in found if not name.startswith("deltawriters")} == {"pyiceberg.io", "pyiceberg.io.pyarrow"}


@pytest.mark.parametrize("module", ["deltawriters", "changelog.rows"])
def test_writers_load_without_spark(module: str) -> None:
    assert not {"pyspark", "py4j", "sink"} & imported_by(module)


def modules_imported_by(file: Path) -> set[str]:
    """Full names of the modules that a module imports, also inside functions. Names that it takes from them are there
    too, since they may be modules.
    """
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(folder: Path, package: str) -> set[str]:
    """The modules in a folder that import a package or a part of it."""
    files = {str(file.relative_to(ROOT)): modules_imported_by(file) for file in folder.rglob("*.py")}
    return {file for file, names in files.items() if any(f"{name}.".startswith(f"{package}.") for name in names)}


def module_graph() -> dict[str, dict[str, int]]:
    """The modules of all packages, each with those that it imports and the line, also for types alone and inside of
    functions. A name that comes from a package is one of its `__init__`, unless it is a module.
    """
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    graph: dict[str, dict[str, int]] = {}
    for module, file in files.items():
        graph[module] = {}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                full = [f"{node.module}.{name}" for name in names]
                names = [name if name in files else str(node.module) for name in full]
            for name in names:
                if name in files and name != module:
                    graph[module].setdefault(name, node.lineno)
    return graph


def circles(graph: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Each set of modules that import each other, directly or not, as lines with the imports that tie it."""

    def reached(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = graph[waiting.pop()].keys() - found
            found |= new
            waiting += new
        return found

    reachable = {module: reached(module) for module in graph}
    told, seen = list[str](), set[str]()
    for module in sorted(graph):
        members = {other for other in reachable[module] if module in reachable[other]}
        if not members or module in seen:
            continue
        seen |= members
        arrows = [(one, other, graph[one][other]) for one in sorted(members) for other in sorted(graph[one])]
        lines = [f"  {one} imports {other} (line {line})" for one, other, line in arrows if other in members]
        told.append("\n".join([f"{len(members)} modules import each other in a circle:", *lines]))
    return told


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone count, and those inside of functions: they are circles for who reads the code."""
    graph = module_graph()
    assert "sink.config.model" in graph["sink.config"], "what a package's `__init__` imports is known"
    found = circles(graph)
    assert not found, "\n" + "\n".join([*found, "Move what they share to a module below both."])


def test_a_circle_is_told_with_its_imports() -> None:
    graph = {"a": {"b": 3}, "b": {"c": 1}, "c": {"a": 7, "d": 2}, "d": {}}
    assert circles(graph) == [
        "3 modules import each other in a circle:\n"
        "  a imports b (line 3)\n  b imports c (line 1)\n  c imports a (line 7)"
    ]


CHOOSE_THE_FORMAT = {"sink/targets/catalogs.py", "sink/targets/capabilities.py"}
NEEDED_BY_TASKS = "sink/spark/daemon.py"
"""Imports what tasks need, before they need it."""


@pytest.mark.parametrize("target", ["iceberg", "delta"])
def test_a_table_format_is_known_only_to_its_own_package(target: str) -> None:
    found = importers(ROOT / "sink", f"sink.targets.{target}")
    assert {"sink/targets/catalogs.py", "sink/targets/capabilities.py"} <= found
    others = {file for file in found if not file.startswith(f"sink/targets/{target}/")}
    assert others <= {*CHOOSE_THE_FORMAT, NEEDED_BY_TASKS}


@pytest.mark.parametrize("above", ["sink.run", "sink.table", "sink.commands", "sink.deadletters"])
def test_targets_import_only_what_is_below_them(above: str) -> None:
    assert importers(ROOT / "sink" / "commands", above), "some module does import it"
    assert importers(ROOT / "sink" / "targets", above) == set()


def test_dead_letters_do_not_know_the_run() -> None:
    assert importers(ROOT / "sink" / "deadletters", "sink.run") == set()
    assert importers(ROOT / "sink" / "deadletters", "sink.table") == set()


def test_a_table_does_not_know_the_job() -> None:
    assert importers(ROOT / "sink" / "table", "sink.run") == set()


def test_databases_are_read_below_who_compares_and_loads() -> None:
    for above in ("sink.verify", "sink.run", "sink.commands", "sink.targets"):
        assert importers(ROOT / "sink" / "databases", above) == set()


def test_a_run_does_not_know_who_watches_it() -> None:
    """It tells an observer, and `sink.console.run` says who that is."""
    assert importers(ROOT / "sink", "sink.watch") - {"sink/console/run.py"} == {
        f"sink/watch/{name}.py" for name in ("metrics", "server", "state")
    }
    told = modules_imported_by(ROOT / "sink" / "table" / "observer.py")
    assert not {name for name in told if name.startswith(("pyspark", "py4j", "sink.run", "sink.table"))}


RUNS_TASKS = [f"sink.spark.{name}" for name in ("engine", "exchange", "joint", "tasks", "writing", "keyreading")]
"""Is behind `sink.table.engine`."""
TYPES = ("pyspark.sql.types", "pyspark.sql.pandas.types")
MAY_KNOW = {
    "pipeline": ("pyspark", "py4j"),  # starts Spark's streaming queries, and waits for them
    "supervisor": ("sink.spark.engine", "sink.spark.joint"),  # chooses the engine
}


DECIDES = [file for folder in ("table", "run") for file in (ROOT / "sink" / folder).glob("*.py")]


@pytest.mark.parametrize("file", DECIDES, ids=lambda file: file.stem)
def test_what_decides_does_not_know_what_runs_its_tasks(file: Path) -> None:
    """But for types, and types of columns. So tests run it without Spark (`tests/memory`)."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        for name in [f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name]
    }
    unknown, known = ("pyspark", "py4j", *RUNS_TASKS), (*TYPES, *MAY_KNOW.get(file.stem, ()))
    found = {name for name in names if f"{name}.".startswith(tuple(f"{part}." for part in unknown))}
    assert {name for name in found if not f"{name}.".startswith(tuple(f"{part}." for part in known))} == set()


@pytest.mark.parametrize("target", ["delta", "iceberg"])
def test_what_a_target_adds_to_the_writers_loads_without_spark(target: str) -> None:
    assert not {"pyspark", "py4j"} & imported_by(f"sink.targets.{target}.writers")


@pytest.mark.parametrize(
    ("module", "others"),
    [
        # what the start of the JVM would wait for
        ("sink.spark.session", {"pyiceberg", "pandas", "deltawriters", "confluent_kafka"}),
        # what only a run that is watched needs
        ("sink.run.pipeline", {"prometheus_client"}),
        # what each Python worker would import, whatever the format
        ("sink.spark.tasks.write", {"confluent_kafka"}),
    ],
)
def test_a_start_imports_no_more_than_it_needs(module: str, others: set[str]) -> None:
    assert not others & imported_by(module)


def test_workers_are_forked_with_all_that_a_task_needs() -> None:
    """A task that finds a module missing imports it, in each new worker again."""
    code = "import sys, sink.spark.daemon; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    needed = {"sink.spark.tasks.write", "sink.targets.delta.writers", "sink.targets.iceberg.writers"}
    assert needed <= set(result.stdout.split())


_MOVING = r"org\.apache\.spark\.sql\.execution\.streaming"
"""Package whose classes are elsewhere in another version."""
_TEXT_OF_ONE_VERSION = re.compile(rf"{_MOVING}|iceberg-spark-runtime-\d|spark-sql-kafka-0-10_\d")
_INSTALLED_VERSION = re.compile(rf"{_MOVING}|\bpyspark\.__version__$|\b(spark|sparkContext)\.version$|\.minor$")


def version_dependent(file: Path) -> set[str]:
    """What a module says of one version of Spark, or asks of the installed one. Comments don't count."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and _TEXT_OF_ONE_VERSION.search(str(node.value)):
            found.add(str(node.value))
        if isinstance(node, ast.Attribute) and _INSTALLED_VERSION.search(ast.unparse(node)):
            found.add(ast.unparse(node))
        # `--version` shows it, and a cache's key has it; both is fine
        judged = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        judged += [node.value] if isinstance(node, ast.Attribute) else []
        found |= {text for text in map(ast.unparse, judged) if text.endswith(".full")}
    return found


def test_what_differs_between_versions_of_spark_is_in_one_module() -> None:
    the_one = ROOT / "sink" / "spark" / "versions.py"
    files = {file for folder in (*PACKAGES, "benchmarks") for file in (ROOT / folder).rglob("*.py")}
    assert {"org.apache.spark.sql.execution.streaming", "self.minor", "self.full"} <= version_dependent(the_one)
    assert {str(file): found for file in files - {the_one} if (found := version_dependent(file))} == {}


FIELD = re.compile(r":(?:param (\w+)|return|raises (?:\w+\.)*_?[A-Z]\w*): \S")
"""A field of a docstring. Group 1 is the parameter's name."""


def documented(node: ast.AST) -> tuple[set[str], list[str]]:
    """The names that `:param` may name in docstrings of a module, class or function, and the docstrings' lines."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return set(), []
    functions = [node] if isinstance(node, ast.FunctionDef) else []
    if isinstance(node, ast.ClassDef):
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    names = {argument.arg for each in functions for argument in ast.walk(each.args) if isinstance(argument, ast.arg)}
    names |= {str(getattr(each.target, "id", "")) for each in node.body if isinstance(each, ast.AnnAssign)}
    values = [each.value for each in node.body if isinstance(each, ast.Expr)]
    texts = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return names, [line.strip() for text in texts for line in text.splitlines()]


def test_docstrings_have_one_known_field_a_line() -> None:
    """`:param NAME:` of a parameter or attribute that exists, `:return:`, and `:raises Error:` with one error."""
    wrong = []
    for file in (file for folder in [*PACKAGES, "tests", "benchmarks"] for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names, lines = documented(node)
            for line in (line for line in lines if line.startswith(":")):
                field = FIELD.match(line)
                is_one = field is not None and not re.search(
                    r":(param \w+|returns?|raises [\w.]+):", line[field.end() :]
                )
                if not is_one or (field and field[1] and field[1] not in names):
                    wrong.append(f"{file.relative_to(ROOT)}: {line}")
    assert wrong == []


def test_modules_are_named_for_what_they_hold() -> None:
    folders = [*PACKAGES, "tests", "benchmarks"]
    names = {file.stem for folder in folders for file in (ROOT / folder).rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "helper", "common", "misc"}


UNSAFE = re.compile(
    r"(c?pickle|cloudpickle|dill|marshal|shelve|jsonpickle|joblib)\.(loads?|Unpickler|open)"
    r"|eval|exec|compile|__import__|(yaml|ruamel)\.(unsafe_|full_)?load(_all)?|os\.(system|popen)|numpy\.load|np\.load"
)
"""Calls that run what they read, or may."""
READS_OUR_OWN = {"sink/spark/tasks/shares.py": {"pickle.load"}}
"""What the driver has packed for its tasks, in the bytes of the job that Spark sends by pickle anyway."""


def unsafe_calls(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(k.arg == "shell" or (k.arg == "allow_pickle" and k.value) for k in node.keywords)
            loader = [ast.unparse(k.value) for k in node.keywords if k.arg == "Loader"]
            if UNSAFE.fullmatch(name) or shell or (loader and loader != ["yaml.SafeLoader"]):
                found.add(name)
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "shelve", "cloudpickle"):
            found.add(f"from {node.module}")
    return found


def test_nothing_from_outside_is_run_when_it_is_read() -> None:
    """Messages, files, tables, registries and the configuration are data."""
    files = {file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    found = {str(file.relative_to(ROOT)): calls for file in files if (calls := unsafe_calls(file))}
    assert found == READS_OUR_OWN


def test_unsafe_calls_are_found(tmp_path: Path) -> None:
    calls = ("pickle.loads(b)", "eval(s)", "yaml.load(s, Loader=yaml.Loader)", "np.load(f, allow_pickle=True)")
    for call in (*calls, "subprocess.run(s, shell=True)", "from pickle import loads"):
        (tmp_path / "module.py").write_text(call)
        assert unsafe_calls(tmp_path / "module.py"), call
    (tmp_path / "module.py").write_text("yaml.compose(s, Loader=yaml.SafeLoader); re.compile(s); json.load(f)")
    assert unsafe_calls(tmp_path / "module.py") == set()
