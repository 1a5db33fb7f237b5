"""Have lm-evaluation-harness score our own answers, and keep what it says. Not run by the tests.

    pip install lm-eval==0.4.13 langdetect nltk    (and Punkt's tables for NLTK, in NLTK_DATA)
    python tests/lm_eval_agreement/record.py

The items have the public layouts, the answers are scripted (answers.py): lm-eval's own tasks
gsm8k, ifeval and humaneval run on them from prompt to metric, with local files for the data. Its
HumanEval loads `code_eval` from a hub; here a module of that name with the same rule (the program
and its test end without an exception within 3 s) stands in.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE))
os.environ |= {"HF_ALLOW_CODE_EVAL": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

CODE_EVAL = """
import subprocess
import sys
import datasets
import evaluate

END = "\\nimport os as _os; _os.write(1, b'reached')"


class CodeEval(evaluate.Metric):
    def _info(self):
        value = datasets.Value("string")
        features = {"predictions": datasets.Sequence(value), "references": value}
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references, k):
        right = []
        for programs, test in zip(predictions, references):
            for program in programs:
                try:
                    command = [sys.executable, "-c", program + "\\n" + test + END]
                    done = subprocess.run(command, capture_output=True, timeout=3)
                    right.append(done.stdout.endswith(b"reached"))
                except subprocess.TimeoutExpired:
                    right.append(False)
        return {"pass@1": sum(right) / len(right)}, {}
"""


def rows() -> dict[str, list[dict[str, Any]]]:
    from answers import CODE, KINDS, NUMBERS, PROSE, REFERENCES

    gsm8k = [
        {"question": "How many?", "answer": f"Some steps.\n#### {right}", "scripted": said}
        for right in REFERENCES
        for said in NUMBERS
    ]
    names = sorted({name for kinds in KINDS.values() for each in kinds for name in each})
    ifeval = [
        {
            "key": number,
            "prompt": "Write a poem about a harbour.",
            "instruction_id_list": [kind],
            # As the public file has it: every argument there is, the others null.
            "kwargs": [{name: each.get(name) for name in names}],
            "scripted": said,
        }
        for number, (kind, each, said) in enumerate(
            (kind, each, said) for kind in KINDS for each in KINDS[kind] for said in PROSE
        )
    ]
    humaneval = [
        {**{k: v for k, v in task.items() if k != "answers"}, "scripted": said}
        for task in CODE
        for said in task["answers"]
    ]
    return {"gsm8k": gsm8k, "ifeval": ifeval, "humaneval_instruct": humaneval}


def main() -> None:
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Scripted(LM):  # type: ignore[misc]
        def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
            return [request.doc["scripted"] for request in requests]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

    import langdetect

    langdetect.DetectorFactory.seed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("code_eval").mkdir()
        Path("code_eval/code_eval.py").write_text(CODE_EVAL)
        public = Path(lm_eval.__file__).parent / "tasks"
        for name, made in rows().items():
            file = Path(folder) / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in made))
            task = name.partition("_")[0]
            Path(f"{name}_own.yaml").write_text(
                f"include: {public}/{task}/{name}.yaml\ntask: {name}_own\ndataset_path: json\n"
                f"dataset_name: null\ndataset_kwargs:\n  data_files:\n    test: {file}\n"
                f"    train: {file}\nnum_fewshot: 0\n"
            )
        tasks = [f"{name}_own" for name in rows()]
        found = lm_eval.simple_evaluate(
            model=Scripted(), tasks=tasks, task_manager=TaskManager(include_path=folder),
            log_samples=True, bootstrap_iters=0, confirm_run_unsafe_code=True,
        )  # fmt: skip
    keep(found, lm_eval.__version__)


def keep(found: Any, version: str) -> None:
    """What lm-eval was given and what it said. One line an item; for IFEval one line for all
    answers (answers.PROSE, in order) to the same instruction."""
    metrics = {"gsm8k": "exact_match", "ifeval": "prompt_level_strict_acc"}
    for name in rows():
        lines: dict[str, dict[str, Any]] = {}
        for number, sample in enumerate(found["samples"][f"{name}_own"]):
            if sample.get("filter") == "strict-match":
                continue  # gsm8k is scored twice; ours follows flexible-extract
            doc = {k: v for k, v in sample["doc"].items() if k not in ("scripted", "key")}
            score = sample[metrics.get(name, "pass@1")]
            if name != "ifeval":
                line = {"doc": doc, "resp": sample["resps"][0][0], "score": float(score)}
                lines[str(number)] = line
                continue
            given = [{k: v for k, v in each.items() if v is not None} for each in doc["kwargs"]]
            doc["kwargs"] = given
            line = lines.setdefault(json.dumps(doc), {"doc": doc, "scores": ""})
            line["scores"] += str(int(score))
        out = HERE / "recorded" / f"{name}.jsonl"
        out.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
        print(out, version)


if __name__ == "__main__":
    main()
