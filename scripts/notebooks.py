"""Executes the notebooks in examples/notebooks one after the other; see scripts/notebook.

A cell fails by an error, and by anything on stderr: that is where the kernel prints a failed `?` and a panic, in a cell that
counts as passed. What a cell shows must be what the file has. A cell with the tag "volatile" may show something else every time,
such as a time, in the same forms. A notebook whose metadata names models (anymesh.models) is skipped where they are not there.
"""

import argparse
import copy
import difflib
import os
import pathlib
import sys
import time

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "notebooks"


def shown(cell):
    """What a cell shows, in a form that does not depend on how it was sent."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            if parts and parts[-1][0] == output.name:
                parts[-1][1] += output.text
            else:
                parts.append([output.name, output.text])
        elif output.output_type == "error":
            parts.append(["error", "\n".join(output.traceback) or output.evalue])
        else:
            parts += [[kind, text] for kind, text in sorted(output.data.items())]
    return parts


def tidy(cell):
    """The outputs of a cell as they are kept: streams in one piece."""
    kept = []
    for output in cell.outputs:
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    cell.outputs = kept


def differences(name, number, cell, stored):
    """Why the cell does not count as passed, if it does not."""
    now, before = shown(cell), shown(stored)
    where = f"{name}, cell {number}"
    wrong = [text for kind, text in now if kind in ("error", "stderr")]
    if wrong:
        return [f"{where} failed:\n{cell.source}\n{''.join(wrong)}"]
    if "volatile" in cell.metadata.get("tags", []):
        now, before = [[kind, ""] for kind, _ in now], [[kind, ""] for kind, _ in before]
    if now == before:
        return []
    lines = [[f"[{kind}] {line}" for kind, text in parts for line in text.splitlines()] for parts in (before, now)]
    diff = list(difflib.unified_diff(*lines, "kept", "now", lineterm="", n=1))
    more = [f"... and {len(diff) - 40} lines more"] if len(diff) > 40 else []
    return [f"{where} shows something else:\n" + "\n".join(line[:300] for line in diff[:40] + more)]


def run(path, deadline, update):
    """The problems of a notebook; None where it was skipped."""
    stored = nbformat.read(path, as_version=4)
    models = pathlib.Path(os.environ["ANYMESH_MODELS"])
    missing = [m for m in stored.metadata.get("anymesh", {}).get("models", []) if not (models / m).exists()]
    if missing:
        print(f"{path.name}: skipped, there is no {models / missing[0]}: scripts/models", flush=True)
        return None
    begun = time.monotonic()
    book = copy.deepcopy(stored)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        book,
        kernel_name="rust",
        timeout_func=lambda _: max(1, deadline - time.monotonic()),
        startup_timeout=120,
        record_timing=False,
        allow_errors=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    problems = []
    try:
        client.execute()
    except nbclient.exceptions.CellTimeoutError:
        problems.append(f"{path.name}: the time was up")
    except nbclient.exceptions.CellExecutionError:
        pass  # It is among the outputs.
    except Exception as error:  # A kernel that died, or never came.
        problems.append(f"{path.name}: {type(error).__name__}: {error}")
    count = 0
    for cell, before in zip(book.cells, stored.cells):
        if cell.cell_type != "code":
            continue
        count += 1
        tidy(cell)
        if update:
            # What went wrong is not kept, whatever is.
            before = copy.deepcopy(cell)
        problems += differences(path.name, count, cell, before)
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    if update and not problems:
        book.metadata["language_info"] = {"name": "rust", "file_extension": ".rs", "mimetype": "text/rust"}
        nbformat.write(book, path)
    verdict = "FAILED" if problems else "kept" if update else "passed"
    print(f"{path.name}: {verdict}, {count} cells, {time.monotonic() - begun:.1f} s", flush=True)
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    deadline = time.monotonic() + float(os.environ.get("ANYMESH_NOTEBOOK_LIMIT", "1500"))
    paths = sorted(p for p in FOLDER.glob("*.ipynb") if not args.names or any(n in p.name for n in args.names))
    if not paths:
        sys.exit(f"no notebook of {args.names} in {FOLDER}")
    results = [run(path, deadline, args.update) for path in paths]
    problems = [problem for result in results for problem in result or []]
    for problem in problems:
        print(problem, file=sys.stderr)
    done = [result for result in results if result is not None]
    print(f"{sum(not r for r in done)} notebooks passed, {sum(bool(r) for r in done)} failed, {results.count(None)} skipped")
    if args.update:
        print("the programs of the tests are written anew by: ANYMESH_UPDATE=1 cargo test --all-features --test notebook_programs")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
