"""The documentation as a site, the files of the how-tos for clusters, and their rows of data."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import kubernetes_validate
import pytest
import yaml
from conftest import BIN, ROOT, save_byte_tokenizer, save_tiny_model
from documents import Wrong, blocks, check
from test_report import CHROMIUM

import toolkit
from toolkit import config
from toolkit.data.prepare import inspect_data
from toolkit.errors import EXIT_CODE_PREEMPTED

KUBERNETES = "1.34"
LOADED = re.compile(
    r"<(?:link|script|img|iframe)\b[^>]*?(?:href|src)=[\"']?((?:https?:)?//[^\"' >]+)"
)


def build(site: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site), *changes]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def drawn(folder: Path, page: str) -> str:
    """Return the document that Chromium makes of a page."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={folder}/chromium", "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout


def found_by(folder: Path, words: str) -> set[str]:
    """Return the pages that the search of the site finds, opened from the folder."""
    document = drawn(folder, f"{(folder / 'site/index.html').as_uri()}?q={quote(words)}")
    links = re.findall(r'<a href="([^"]*)" class="md-search-result__link', document)
    return {Path(urlsplit(link).path).name for link in links}


SCROLLED = """<script>addEventListener("load", () => setTimeout(() => {
  const wrap = document.querySelector(".md-typeset__scrollwrap")
  wrap.scrollLeft = 300
  const [cell, edge] = [wrap.querySelector("td"), wrap].map(x => x.getBoundingClientRect().left)
  document.body.dataset.first = Math.round(cell - edge)
}, 1000))</script>"""


def first_column(folder: Path, style: bool = True) -> int:
    """Return how far from its edge a wide table has its first column after it was scrolled."""
    text = (folder / "site/evidence/architectures.html").read_text("utf-8")
    text = text if style else re.sub("<link[^>]*assets/site.css[^>]*>", "", text)
    page = folder / "site/evidence/scrolled.html"
    page.write_text(text.replace("</body>", f"{SCROLLED}</body>"), "utf-8")
    found = re.search(r'data-first="(-?\d+)"', drawn(folder, page.as_uri()))
    page.unlink()
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stderr
    shown = {file.relative_to(tmp_path / "site") for file in (tmp_path / "site").rglob("*.html")}
    pages = {file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")}
    pages.add(Path("changelog.md"))  # of the repository
    assert shown - {Path("404.html")} == {page.with_suffix(".html") for page in pages}
    settings = (tmp_path / "site/reference/settings.html").read_text("utf-8")
    assert "<code>train.<wbr>max_<wbr>steps</code>" in settings  # a table breaks it there
    assert "<code>train.max_steps</code>" not in settings.partition("<table>")[2]
    tutorial = (tmp_path / "site/tutorial.html").read_text("utf-8")
    assert '<code><span class="flag">--a</span>ccelerate_config cpu</code>' in tutorial
    assert tutorial.count('class="language-bash highlight"') > 5  # which site.css wraps
    architectures = (tmp_path / "site/evidence/architectures.html").read_text("utf-8")
    assert architectures.count("<code>model.<wbr>layers.*</code>") > 100
    assert "<em>" not in architectures  # an asterisk of a pattern that Markdown took
    api = (tmp_path / "site/reference/python.html").read_text("utf-8")
    for name in re.findall(r"^::: (.+)$", (ROOT / "docs/reference/python.md").read_text(), re.M):
        assert api.count(f'<h3 id="{name}"') == 1
    assert "global gradient norm before clipping" not in api  # of comments nothing is read
    assert "number of terms of each micro-batch in the mean" in api  # of docstrings all
    if CHROMIUM:
        assert "glossary.html" in found_by(tmp_path, "gradient checkpointing")
        assert "installation.html" in found_by(tmp_path, "docker")
        assert found_by(tmp_path, "xyzzyx") == set()
        assert first_column(tmp_path) == 0  # it stays
        assert first_column(tmp_path, style=False) < -100
    for page in shown:
        text = (tmp_path / "site" / page).read_text("utf-8")
        assert not LOADED.findall(text), page
        assert (
            'class="mermaid"' not in text
        )  # which the theme would draw by a script from elsewhere
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text("utf-8")), sheet


def test_rows_of_wide_tables_are_cards_on_a_small_screen() -> None:
    content = runpy.run_path(str(ROOT / "docs/site_hooks.py"))["on_page_content"]

    def table(columns: int) -> str:
        head, row = (
            "".join(f"<{tag}>{name}{i}</{tag}>" for i in range(columns))
            for tag, name in (("th", "title "), ("td", "value "))
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody><tr>{row}</tr></tbody></table>"

    wide = content(table(5))
    assert wide.startswith("<table data-cards>")
    assert all(f'<td data-title="title {i}">value {i}</td>' in wide for i in range(5))
    assert content(table(4)) == table(4)
    sheet = (ROOT / "docs/assets/site.css").read_text("utf-8")
    small = sheet.partition("@media screen and (max-width")[2]
    assert "table[data-cards]" in small
    assert "content: attr(data-title)" in small


def test_formulas_of_objectives_and_metrics_have_their_symbols() -> None:
    page = (ROOT / "docs/preference.md").read_text("utf-8")
    assert "*β d*" in page
    assert "*β r*<sub>c</sub>" in page
    found = re.findall(r"\bbeta [a-z]\b|\b[a-z]_[cw]\b", page)
    assert not found


@pytest.mark.slow
def test_a_font_or_a_broken_link_would_be_found(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "font: false" in settings
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Title\n", "utf-8")
    wrong = settings.replace("font: false", "font: {text: Roboto}")
    wrong = re.sub(r"^(hooks|extra_css):.*\n", "", wrong, flags=re.MULTILINE)
    wrong = wrong[: wrong.index("nav:")].replace("docs_dir: docs", f"docs_dir: {tmp_path}/docs")
    (tmp_path / "mkdocs.yml").write_text(wrong, "utf-8")
    done = build(tmp_path / "site", "-f", str(tmp_path / "mkdocs.yml"))
    assert done.returncode == 0, done.stderr
    assert LOADED.findall((tmp_path / "site/index.html").read_text("utf-8"))
    (tmp_path / "docs/index.md").write_text("[there](nowhere.md)\n", "utf-8")
    done = build(tmp_path / "site", "-f", str(tmp_path / "mkdocs.yml"))
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]


def test_readme_and_site_say_the_same_of_what_was_run() -> None:
    said = []
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text("utf-8")
        state = re.search(r"\*\*Status\.\*\*(.*?)(?:\n\n|\Z)", text, re.DOTALL)
        assert state is not None
        assert "evidence/benchmarks/gpu.md)" in state[1]
        said.append(" ".join(re.sub(r"\[[^]]*\]\([^)]*\)", "", state[1]).split()))
    assert said[0] == said[1]
    assert "NCCL" in said[0]


def test_the_changelog_is_by_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## ([\d.]+) - (?:\d{4}-\d\d-\d\d|unreleased)$", text, re.MULTILINE)
    assert len(versions) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert versions[0] == toolkit.__version__
    assert f"version: {versions[0]}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert not [
        file for file in re.findall(r"\]\((docs/[^)#]+)", text) if not (ROOT / file).exists()
    ]


def test_the_slurm_file() -> None:
    file = ROOT / "examples" / "slurm.sbatch"
    done = subprocess.run([BIN / "shellcheck", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = file.read_text("utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^ +exec (toolkit train .*)$", text, re.MULTILINE)
    given = {'"$CONFIG"': "CONFIG", '"$MAIN"': "10.0.0.1", '"$SLURM_NODEID"': "1"}
    given |= {'"$SLURM_NNODES"': "2", '"$((8 * SLURM_NNODES))"': "16"}
    for variable, value in given.items():
        assert variable in line
        line = line.replace(variable, value)
    check(line)
    (seconds,) = re.findall(r"^#SBATCH --signal=USR1@(\d+)$", text, re.MULTILINE)
    assert int(seconds) > config.CheckpointConfig().grace_seconds
    assert f'if [ "$code" = {EXIT_CODE_PREEMPTED} ]; then' in text
    with pytest.raises(Wrong, match="machine_rnk"):
        check(line.replace("--machine_rank", "--machine_rnk"))


def test_the_docker_file_keeps_the_rules_of_hadolint() -> None:
    """By the letter: what is pinned, cleaned up, run as whom."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    lines = [x for x in text.replace("\\\n", " ").splitlines() if x and not x.startswith("#")]
    by_word: dict[str, list[str]] = {}
    for line in lines:
        word, _, rest = line.partition(" ")
        by_word.setdefault(word, []).append(rest)
    assert set(by_word) == {
        *("FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"),
    }
    (image,) = by_word["FROM"]
    assert re.fullmatch(r"python:3\.\d+-[a-z-]+", image)  # a tag that is not latest
    for run in by_word["RUN"]:
        assert "sudo" not in run
        assert "cd " not in run
        if "apt-get install" in run:
            assert "--no-install-recommends --yes" in run
            assert "rm -rf /var/lib/apt/lists/*" in run
        if "pip install" in run:
            assert "--no-cache-dir" in run
            assert "==" in run or "--constraint" in run  # pinned
    assert by_word["USER"][-1] not in ("root", "0")
    assert all(folder.startswith("/") for folder in by_word["WORKDIR"])
    assert json.loads(by_word["ENTRYPOINT"][0]) == ["toolkit"]
    assert json.loads(by_word["CMD"][0]) == ["--help"]
    extras = re.search(r"^EXTRAS=(.*)$", "\n".join(by_word["ARG"]), re.MULTILINE)
    assert extras is not None
    check(f"pip install '.[{extras[1]}]'")
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None  # which the file takes its torch from
    for part in ("constraints.txt", "recipes", "accelerate_configs", "toolkit"):
        assert not re.search(rf"^{part}\b", (ROOT / ".dockerignore").read_text(), re.MULTILINE)


def test_the_kubernetes_file() -> None:
    file = ROOT / "examples" / "kubernetes.yaml"
    service, job = yaml.safe_load_all(file.read_text("utf-8"))
    for part in (service, job):
        kubernetes_validate.validate(part, KUBERNETES, strict=True)
    wrong = job | {"spec": job["spec"] | {"complettions": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="complettions"):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    line = container["args"][0].removeprefix("exec ").replace('"$JOB_COMPLETION_INDEX"', "1")
    check(line.replace("llama-70b.yaml", "CONFIG"))
    # The first pod has the name that the others meet at, and a port that the Service has.
    port = service["spec"]["ports"][0]["port"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--main_process_ip {name}-0.{pod['subdomain']} --main_process_port {port}" in line
    machines, gpus = job["spec"]["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert job["spec"]["parallelism"] == machines
    assert f"--num_machines {machines} --num_processes {machines * gpus}" in line
    assert pod["terminationGracePeriodSeconds"] > config.CheckpointConfig().grace_seconds
    by_code = [rule.get("onExitCodes", {}) for rule in job["spec"]["podFailurePolicy"]["rules"]]
    assert [code.get("values") for code in by_code] == [[2], [EXIT_CODE_PREEMPTED], None]
    assert {code.get("containerName", container["name"]) for code in by_code} == {container["name"]}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_byte_tokenizer(folder)
    template = (ROOT / "recipes/configs/chat_template.jinja").read_text("utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return save_tiny_model(folder, max_position_embeddings=512)


FORMATS = list(blocks(ROOT / "docs" / "howto" / "data_formats.md"))


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        pytest.param(*pair, id="-".join(json.loads(pair[0].text)))
        for pair in zip(FORMATS[::2], FORMATS[1::2], strict=True)
    ],
)
def test_a_row_of_each_format(row, shown, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(json.loads(row.text))}\n" * 4, "utf-8")
    flags = ["--model.name_or_path", str(model), "--data.train_files", str(file)]
    flags += ["--data.sequence_length", "128", "--data.eval_split", "0"]
    (source,) = inspect_data(config.parse(config.FinetuneConfig, flags))["sources"]
    assert (source["examples"], source["left_out"], source["truncated"]) == (4, 0, 0)
    parts = source["first"][0]["parts"]
    marked = "".join(f"[[{p['text']}]]" if p["supervised"] else p["text"] for p in parts)
    assert shown.text == f"{source['format']}\n{marked}\n"


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "explanation"
    subprocess.run([sys.executable, folder / "draw.py", tmp_path], check=True)
    drawn = {file.name: file for file in tmp_path.glob("*.svg")}
    assert {file.name for file in folder.glob("*.svg")} == set(drawn)
    page = (folder / "fsdp2.md").read_text("utf-8")
    for name, file in drawn.items():
        assert f"]({name})" in page
        # As it stands here, but for the numbers: they follow the version of matplotlib.
        texts = [
            re.findall(r"<text[^>]*>([^<]*)", f.read_text("utf-8")) for f in (file, folder / name)
        ]
        assert texts[0] == texts[1]
        assert texts[0]
