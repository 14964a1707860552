"""`gspo lab` on the command line: names, the list, exit codes."""

from __future__ import annotations

import pytest

from gspo import cli
from gspo.lab import experiment
from gspo.lab.experiment import Trial, shipped_sha256
from gspo.lab.table import EXPERIMENTS, asked


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.guarded(lambda: cli.app(["lab", *words]))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert [text.split()[0] for text in out.splitlines()] == list(EXPERIMENTS)
    assert {"control", "clip-fraction", "precision", "reuse", "moe", "efficiency", "identities"} <= set(EXPERIMENTS)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["presicion"], "did you mean 'precision'"),
        (["clip"], "did you mean 'clip-fraction'"),
        (["nothing-like-it"], "There are identities"),
        ([], "--all"),
        (["control", "--all"], "--all"),
        (["control", "steps=3"], "only dir=FOLDER"),
        (["control", "dir=a", "dir=b"], "dir= is given 2 times"),
        (["clip-fraction", "--quick", f"dir={__file__}"], "no folder that can be made"),
        (["clip-fraction", "--quick", "dir=/proc/x"], "dir=/proc/x: no folder that can be made"),
    ],
)
def test_bad_words_end_with_2(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2, out
    assert part.lower() in err.lower()


def test_the_folder_and_all() -> None:
    folder, experiments = asked(["dir=x/y", "moe", "control"])
    assert (str(folder), [e.name for e in experiments]) == ("x/y", ["moe", "control"])
    folder, experiments = asked([], every=True)
    assert (str(folder), len(experiments)) == ("runs/lab", len(EXPERIMENTS))


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_arm_is_a_run_that_the_product_accepts(name: str) -> None:
    for scale in ("quick", "full"):
        trials = EXPERIMENTS[name].trials(scale)
        assert len({(t.arm.key, t.seed) for t in trials}) == len(trials), "two arms of one name"
        for trial in trials:
            assert trial.run.threads == 1
            assert trial.run.seed == trial.seed
            assert trial.id == Trial(trial.arm, trial.seed).id
        counts = {t.arm.key: sum(o.arm.key == t.arm.key for o in trials) for t in trials}
        assert min(counts.values()) >= (3 if scale == "full" else 1)


def test_a_setting_a_seed_or_a_program_makes_another_trial() -> None:
    first, *others = EXPERIMENTS["control"].trials("quick")
    assert first.id not in {other.id for other in others}
    shared = {t.id for t in EXPERIMENTS["clip-fraction"].trials("quick")}
    assert shared <= {t.id for t in EXPERIMENTS["control"].trials("quick")}, "the same arms are run once"


def test_the_headline_has_five_seeds_and_bands_has_seeds_of_its_own() -> None:
    headline = EXPERIMENTS["precision"].protocol("quick").arms[0].key
    assert [t.seed for t in EXPERIMENTS["precision"].trials("full") if t.arm.key == headline] == [0, 1, 2, 3, 4]
    others = {t.seed for name, e in EXPERIMENTS.items() if name != "bands" for t in e.trials("full")}
    assert not others & {t.seed for t in EXPERIMENTS["bands"].trials("full")}


def test_other_weights_under_the_same_name_make_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = EXPERIMENTS["control"].quick.arms[0]
    before = Trial(arm, 0).id
    assert shipped_sha256("tiny-dense") is not None
    monkeypatch.setattr(experiment, "shipped_sha256", lambda model: "other weights")
    assert Trial(arm, 0).id != before
