"""Settings from real YAML files and from words: what is understood, what is refused, and the name that was meant."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gspo import config, presets, settings, written
from gspo.critic_config import Critic
from gspo.errors import InputError
from gspo.stage_config import Sft


@pytest.fixture
def recipe(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refusal(*arguments, **more):
    with pytest.raises(InputError) as caught:
        settings.load(*arguments, **more)
    return str(caught.value)


def test_a_recipe_with_words_and_keys_laid_over_it(recipe):
    path = recipe("steps: 7\noptimizer:\n  learning_rate: 1e-5\n  betas: [0.8, 0.9]\nsampling: {temperature: 0.7}\n")
    run = settings.load(path, ["optimizer.learning_rate=2e-5", "data.system=be brief"], {"steps": 9, "eval.every": 0})
    assert (run.steps, run.eval.every, run.data.system) == (9, 0, "be brief")
    assert (run.optimizer.learning_rate, run.optimizer.betas, run.sampling.temperature) == (2e-5, (0.8, 0.9), 0.7)
    assert run.dir == "runs/mine"
    assert settings.load(None).dir is None


def test_numbers_written_as_text_are_numbers(recipe):
    # YAML reads 1e-6 as text: it wants 1.0e-6.
    assert yaml.safe_load("1e-6") == "1e-6"
    assert settings.load(recipe("optimizer: {learning_rate: 1e-6}\n")).optimizer.learning_rate == 1e-6
    assert settings.load(recipe("optimizer: {learning_rate: '1e-6'}\n")).optimizer.learning_rate == 1e-6
    assert settings.load(None, ["optimizer.learning_rate=1e-6"]).optimizer.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("text", "word", "key", "near"),
    [
        ("learning_rate: 1e-5", "learning_rate=1e-5", "learning_rate", "optimizer.learning_rate"),
        (
            "optimizer: {learning_rte: 1e-5}",
            "optimizer.learning_rte=1e-5",
            "optimizer.learning_rte",
            "optimizer.learning_rate",
        ),
        (
            "sampling: {prompts_per_step: 4}",
            "sampling.prompts_per_step=4",
            "sampling.prompts_per_step",
            "prompts_per_step",
        ),
        ("optimizer: {temperature: 1}", "optimizer.temperature=1", "optimizer.temperature", "sampling.temperature"),
        ("promts_per_step: 4", "promts_per_step=4", "promts_per_step", "prompts_per_step"),
        ("algorithm: {clip_hi: 1}", "algorithm.clip_hi=1", "algorithm.clip_hi", "algorithm.clip_high"),
        ("model: {dtpe: float32}", "model.dtpe=float32", "model.dtpe", "model.dtype"),
        ("eval: {evry: 3}", "eval.evry=3", "eval.evry", "eval.every"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(recipe, text, word, key, near):
    for message in (refusal(recipe(text)), refusal(None, [word]), refusal(None, None, keys={key: 1})):
        assert f"{key}: no such key; did you mean {near!r}?" in message


def test_a_key_that_is_like_no_other_gets_the_list_of_its_section():
    assert "wombat: no such key in the top level, which has dir, steps, seed" in refusal(None, ["wombat=3"])


def test_every_fault_is_told_at_once(recipe):
    message = refusal(recipe("stepz: 3\nsampling: {temprature: 1}\ngroup_size: many\n"))
    assert all(part in message for part in ("'steps'", "'sampling.temperature'", "group_size", "'many'"))


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("steps=many", ["steps", "integer", "'many'"]),
        ("steps=1.5", ["steps", "1.5"]),
        ("steps=null", ["steps", "None"]),
        ("group_size=0", ["group_size", "greater than 0"]),
        ("sampling.top_p=2", ["sampling.top_p", "less than or equal to 1"]),
        ("sampling=hot", ["sampling", "'hot'"]),
        ("model.dtype=float8", ["model.dtype", "'float32'", "'float8'"]),
        ("model.name.x=3", ["model.name"]),
        ("steps", ["'steps'", "key=value"]),
        ("algorithm=gspoo", ["gspoo", "did you mean 'gspo'", "grpo"]),
        ("algorithm.aggregation=token_mean", ["aggregation=sequence_mean"]),
        ("algorithm.clip_low=wide", ["algorithm.clip_low: input should be a valid number", "'wide'"]),
    ],
)
def test_wrong_values_are_refused(word, parts):
    message = refusal(None, [word])
    assert [part for part in parts if part not in message] == []


def test_a_bare_value_replaces_its_section(recipe):
    path = recipe(
        "algorithm: {name: gspo, clip_low: 0.001}\nreward: {function: 'regex:7', weight: 2}\nmodel: random-dense\ndata: rows.jsonl\n"
    )
    run = settings.load(path)
    assert (run.algorithm.clip_low, run.reward[0].weight, run.model.name, run.data.source) == (
        0.001,
        2,
        "random-dense",
        "rows.jsonl",
    )
    run = settings.load(path, ["algorithm=grpo", "reward=number", "model.dtype=float64", "data.limit=5"])
    assert run.algorithm == presets.PRESETS["grpo"]
    assert run.reward == (config.RewardRule(),)
    assert run.model == config.Model(name="random-dense", dtype="float64")
    assert run.data == config.Prompts(source="rows.jsonl", limit=5)


def test_a_function_from_python_is_a_reward():
    def judge(completion):
        return 1.0

    run = settings.load(None, None, {"reward": judge})
    assert run.reward[0].function is judge
    assert settings.dump(run)["reward"]["function"].endswith("judge")


def test_group_size_one_and_too_many_updates_are_refused_with_the_reason():
    assert "group_size=2 or more" in refusal(None, ["group_size=1"])
    message = refusal(None, ["algorithm.updates_per_step=5", "prompts_per_step=3"])
    assert all(part in message for part in ("prompts_per_step=5", "algorithm.updates_per_step=3"))
    settings.load(None, ["algorithm.updates_per_step=3", "prompts_per_step=3", "group_size=5"])


def test_sizes_need_not_divide_each_other():
    # huggingface/trl#2858: 3 prompts of 5 answers, micro-batches of any size.
    run = settings.load(
        None, ["prompts_per_step=3", "group_size=5", "algorithm.updates_per_step=2", "max_tokens_per_microbatch=999"]
    )
    assert (run.prompts_per_step, run.group_size) == (3, 5)


def test_missing_recipe_names_the_nearest():
    message = refusal("no/such/recipe.yaml")
    assert "no/such/recipe.yaml: no such file" in message
    for name in settings.recipes():
        assert f"did you mean {name!r}" in refusal(name + "x").replace("Did", "did")


def test_built_in_recipes_can_be_loaded():
    for name in settings.recipes():
        assert settings.load(name).dir == f"runs/{name}"


@pytest.mark.parametrize(
    ("text", "part"), [("steps: [1\n", "not valid YAML"), ("- steps\n", "found list"), ("", "found NoneType")]
)
def test_files_that_are_no_settings(recipe, text, part):
    path = recipe(text)
    message = refusal(path)
    assert str(path) in message
    assert part in message


def test_every_key_can_be_set(recipe):
    """What `fields` lists is what `load` takes: each key with the value that it has already."""
    optional = {
        "eval.reward": "eval.reward=exact",
        "model.lora": "model.lora=8",
        "critic": "algorithm=ppo",
        "conversation": "conversation.tools=calculator",
    }
    for name in dict(settings.fields()):
        words = [word for section, word in optional.items() if name.startswith(f"{section}.")]  # null unless asked for
        value = settings.dump(settings.load(None, words))
        for part in name.split("."):
            value = value[part]
        assert settings.load(None, words, {name: value}) == settings.load(None, words), name


def test_a_section_that_is_null_says_what_its_keys_would_be():
    assert settings.default("conversation.max_turns") == 4
    assert settings.load(None, ["conversation.tools=calculator"]).conversation.max_turns == 4
    assert settings.load(None).conversation is None


def test_a_dumped_run_reads_back_as_itself(recipe):
    run = settings.load(
        None,
        [
            "algorithm=dapo",
            "algorithm.clip_low=0.1",
            "eval.reward=boxed",
            "reward=[number:gold, {function: overlong, weight: 0.5}]",
            "data.system='yes'",
            "model.name=owner/name@1e3",
        ],
    )
    text = yaml.safe_dump({"about": {"version": "9", "seed": 3}, **settings.dump(run)})
    assert settings.load(recipe(text, "run.yaml")) == run


def test_reading_settings_loads_no_torch():
    code = "import sys, gspo.settings; gspo.settings.load(None); print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_a_bare_value_stands_for_its_section_at_any_depth():
    run = settings.load(None, ["eval.reward=boxed", "eval.reward.weight=2"])
    assert run.eval.reward == (config.RewardRule(function="boxed", weight=2),)


@pytest.mark.parametrize("text", [r"#\d+", "Be brief. #1 rule", "a: b", "[0-9]", "1e5", "yes"])
def test_text_on_the_command_line_is_taken_as_it_stands(text):
    run = settings.load(None, [f"reward=regex:{text}", f"data.system={text}", f"model={text}"])
    assert (run.reward[0].function.removeprefix("regex:"), run.data.system, run.model.name) == (text, text, text)


def test_several_rewards_are_a_list_and_one_needs_none():
    rules = (config.RewardRule(function="number"), config.RewardRule(function="judge.py:f", weight=0.5))
    word = "[number, {function: 'judge.py:f', weight: 0.5}]"
    run = settings.load(None, [f"reward={word}", f"eval.reward={word}"])
    assert (run.reward, run.eval.reward) == (rules, rules)
    assert settings.load(None, None, {"reward": [*rules]}).reward == rules
    assert settings.dump(settings.load(None, ["reward=number"]))["reward"] == {"function": "number", "weight": 1.0}
    assert [rule["weight"] for rule in settings.dump(run)["reward"]] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["reward=[]"], "reward: an empty list"),
        (["reward=[number, exact]", "reward.weight=2"], "there are 2 reward rules"),
        (["reward.pattern=7"], "as in regex:PATTERN"),
        (["reward.answer=gold"], "as in number:COLUMN"),
        (["reward.weight=much"], "reward.weight: input should be a valid number"),
        (["algorithm.source=mine"], "which paper gspo is from is said, and not set"),
    ],
)
def test_rewards_are_refused_by_name(words, part):
    message = refusal(None, words)
    assert part in message
    assert "\n" not in message


def test_null_on_the_command_line_is_nothing():
    assert settings.load(None, ["data.system=null", "eval.reward=null", "dir=null"]) == settings.load(None)


def test_a_switch_is_no_number():
    with pytest.raises(InputError, match="steps: expected a value, found true"):
        settings.load(None, ["steps=true"])


@pytest.mark.parametrize(
    ("word", "near"),
    [("optimizer.steps=3", "'steps'"), ("evl.every=1", "'eval'"), ("reward.wieght=2", "'reward.weight'")],
)
def test_the_nearest_name_is_the_one_that_was_meant(word, near):
    with pytest.raises(InputError, match=f"did you mean {near}"):
        settings.load(None, [word])


@pytest.mark.parametrize(
    "word", ["optimizer.learning_rate=.inf", "sampling.temperature=.nan", "algorithm.clip_low=.inf"]
)
def test_numbers_are_finite(word):
    with pytest.raises(InputError, match="finite"):
        settings.load(None, [word])


@pytest.mark.parametrize("word", ["algorithm.clip_low=true", "seed=18446744073709551616", "threads=100000", "dir="])
def test_values_out_of_range_are_refused(word):
    with pytest.raises(InputError, match=word.partition("=")[0]):
        settings.load(None, [word])


def test_a_key_stands_once(recipe):
    with pytest.raises(InputError, match="'steps' stands twice"):
        settings.load(recipe("steps: 1\nsteps: 2\n"))
    with pytest.raises(InputError, match="steps is set twice"):
        settings.load(None, ["steps=1", "steps=2"])


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("model=random-moe", "model.name=tiny-dense", "model.name"),
        ("data.source=addition", "data=sort:5", "data.source"),
        ("algorithm=grpo", "algorithm.name=dapo", "algorithm.name"),
        ("reward=number", "reward.function=exact", "reward.function"),
        ("model.lora.rank=4", "model.lora=8", "model.lora.rank"),
        (" steps=3", "steps=4", "steps"),
        ("data={source: sort:5, limit: 3}", "data.limit=4", "data.limit"),
    ],
)
def test_a_key_is_set_once_however_it_is_written(first, second, key):
    with pytest.raises(InputError) as error:
        settings.load(None, [first, second])
    assert f"{key} is set twice" in str(error.value)
    assert repr(first) in str(error.value)
    assert repr(second) in str(error.value)


@pytest.mark.parametrize("turned", [False, True])
def test_no_word_is_lost_whatever_their_order(turned):
    words = ["data.limit=3", "data=sort:5", "model.lora=4", "model=tiny-dense", "algorithm.clip_low=0.1", "algorithm=grpo", "reward.weight=0.5", "reward=exact"]  # fmt: skip
    run = settings.load(None, words[::-1] if turned else words)
    assert (run.data.source, run.data.limit, run.model.name, run.model.lora.rank) == ("sort:5", 3, "tiny-dense", 4)
    assert (run.algorithm.name, run.algorithm.clip_low) == ("grpo", 0.1)
    assert (run.reward[0].function, run.reward[0].weight) == ("exact", 0.5)
    keys = dict(pair.split("=", 1) for pair in words)
    assert settings.load(None, keys=keys).data.limit == 3, "from Python too"


def test_numbers_and_switches_are_what_they_look_like(recipe):
    run = settings.load(None, ["steps=010", "seed=017", "guard=off", "algorithm=grpo", "algorithm.routing=off"])
    assert (run.steps, run.seed, run.guard, run.algorithm.routing) == (10, 17, "off", "off")
    assert settings.load(recipe("steps: 010\nguard: off\n")).steps == 10
    with pytest.raises(InputError, match="steps"):
        settings.load(None, ["steps=1:30"])
    with pytest.raises(InputError, match="'off', 'warn' or 'rollback'"):
        settings.load(None, ["guard=on"])


@pytest.mark.parametrize("text", ["1e5", "010", "1:30", "off", "true", "~", "12_000", ".5"])
def test_a_text_that_looks_like_something_else_is_dumped_as_a_text(text):
    run = settings.load(None, keys={"data.prompt": text})
    dumped = written.write(settings.dump(run))
    assert settings.check(written.read(dumped), "run.yaml") == run
    assert yaml.safe_load(dumped)["data"]["prompt"] == text, "as YAML 1.1, which most readers are of"


def test_a_section_in_braces_is_a_section():
    run = settings.load(None, ["data={source: few.jsonl, limit: 3}"])
    assert (run.data.source, run.data.limit) == ("few.jsonl", 3)


def test_the_home_folder_is_found_without_a_shell(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    words = ["dir=~/run", "data=~/x.jsonl", "model=~/m", "reward=~/judge.py:score", "eval.source=~/y.jsonl"]
    run = settings.load(None, words)
    found = (run.dir, run.data.source, run.model.name, run.reward[0].function, run.eval.source)
    assert found == tuple(f"/home/ada/{name}" for name in ("run", "x.jsonl", "m", "judge.py:score", "y.jsonl"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["=3"], "settings are written key=value"),
        (["data=sort:5", "data.split=test"], "data.split=test has no effect: sort:5"),
        (["data=rows.jsonl", "eval.source=held.jsonl", "eval.split=dev"], "eval.split=dev has no effect: held.jsonl"),
        (["algorithm.correction=token_mask", "algorithm.correction_band=[2,0.5]"], "the smaller first"),
        (["judging.workers=100000"], "less than or equal to 256"),
    ],
)
def test_what_could_only_fail_or_do_nothing_is_refused(words, said):
    with pytest.raises(InputError, match=re.escape(said)):
        settings.load(None, words)


def test_turns_of_answers_that_have_one_are_refused():
    with pytest.raises(InputError, match=r"data\.turns=last has no effect without data.messages"):
        settings.load_as(Sft, None, ["data.turns=last"])


def test_a_mapping_from_python_is_laid_over_the_recipes_section(recipe):
    path = recipe("optimizer:\n  learning_rate: 3.0e-3\nalgorithm:\n  name: gspo\n  clip_low: 1.0e-3\n")
    run = settings.load(path, keys={"optimizer": {"warmup_updates": 2}, "algorithm": {"name": "grpo"}})
    assert (run.optimizer.learning_rate, run.optimizer.warmup_updates) == (3e-3, 2)
    assert run.algorithm.clip_low == 0.2, "a section that is named anew starts anew"


def test_a_critic_is_there_if_the_algorithm_needs_one_and_only_then():
    assert settings.load(None).critic is None
    assert settings.load(None, ["critic=null"]).critic is None
    run = settings.load(None, ["algorithm=ppo", "group_size=1"])
    assert run.critic == Critic()
    assert settings.check(settings.dump(run), "") == run
    assert settings.load(None, ["algorithm=ppo", "critic=shared"]).critic.backbone == "shared"
    assert settings.load(None, ["algorithm=ppo", "critic.gae_lambda=1"]).critic.gae_lambda == 1
    assert settings.default("critic.gae_lambda") == 0.95
    own = {"name": "mine", "ratio": "token", "gate": "none", "aggregation": "token_mean", "advantage": "gae"}
    assert settings.load(None, keys={"algorithm": own}).critic == Critic()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["critic=shared"], ["critic: has no effect with algorithm=gspo", "advantage=group_mean_std", "algorithm=ppo"]),
        (["algorithm=grpo", "critic.gamma=1"], ["critic: has no effect with algorithm=grpo"]),
        (["algorithm=ppo", "critic.value_coefficient=1"], ["value_coefficient has no effect with backbone=separate"]),
        (["algorithm=ppo", "critic=shared", "critic.model=x"], ["model has no effect with backbone=shared"]),
        (["algorithm=ppo", "critic=shared", "critic.learning_rate=1"], ["learning_rate has no effect"]),
        (["algorithm=ppo", "critic.kl_target=6"], ["kl_target steers the KL term of the reward", "kl_in=reward"]),
        (
            ["algorithm=ppo", "critic.kl_target=6", "algorithm.kl_coefficient=0.1"],
            ["kl_target steers the KL term of the reward"],
        ),
        (
            ["algorithm=ppo", "critic.end_penalty=1", "algorithm.mask_truncated=true"],
            ["end_penalty has no effect", "mask_truncated"],
        ),
        (["algorithm=ppo", "critic.gae_lambda=1.5"], ["critic.gae_lambda", "less than or equal to 1"]),
        (["algorithm=ppo", "critic.lambda=1"], ["critic.lambda: no such key", "critic.gae_lambda"]),
        (["algorithm=ppo", "critic=borrowed"], ["critic.backbone", "'separate'", "'borrowed'"]),
    ],
)
def test_keys_of_a_critic_that_have_no_effect_are_refused(words, parts):
    message = refusal(None, words)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("words", "rank", "targets"),
    [
        (["model.lora=8"], 8, None),
        (["model.lora.targets=q_proj, v_proj"], None, ("q_proj", "v_proj")),
        (["model.lora=8", "model.lora.targets=[q_proj,v_proj]"], 8, ("q_proj", "v_proj")),
        (["model=tiny-moe", "model.lora.rank=8", "model.lora.targets=all-linear"], 8, ("all-linear",)),
    ],
)
def test_an_adapter_is_asked_for_by_its_rank_or_any_of_its_keys(words, rank, targets):
    assert config.Run().model.lora is None
    lora = settings.load(None, words).model.lora
    assert (lora.rank, lora.targets) == (rank, targets)
    again = settings.check(settings.dump(settings.load(None, words)), "run.yaml")
    assert again.model.lora == lora


def test_an_adapter_has_no_dropout_and_no_empty_rank():
    assert "model.lora.dropout: no such key" in refusal(None, ["model.lora.dropout=0.1"])
    assert "model.lora.rank" in refusal(None, ["model.lora=0"])


def test_rewards_of_a_command_are_read_as_those_of_a_recipe():
    words = ["[number, {function: 'regex:a', weight: .5}]", "judge.py:score", "{function: length, weight: 2}"]
    read = settings.rules(words)
    assert [(rule.function, rule.weight) for rule in read] == [
        ("number", 1.0), ("regex:a", 0.5), ("judge.py:score", 1.0), ("length", 2.0),
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"reward\.wieght: no such key; did you mean 'reward\.weight'"):
        settings.rules(["{function: number, wieght: 2}"])


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("data: pairs.jsonl\nepochs: 2\n", "sft"),
        ("data: {source: pairs.jsonl, answer: reply}\nbatch_size: 8\nepocs: 2\n", "sft"),
        ("data: {source: pairs.jsonl, chosen: better}\ncentring: 0.01\n", "reward"),
        ("steps: 3\nabout: {command: sft}\n", "sft"),
    ],
)
def test_a_recipe_of_another_command_is_named(recipe, text, command):
    path = recipe(text)
    assert refusal(path) == (
        f"{path}: a recipe of `gspo {command}`, and not of `gspo train`: start it with `gspo {command} {path}`"
    )


def test_a_built_in_recipe_of_another_command_is_named():
    assert "`gspo reward` has one: start it with `gspo reward letters`" in refusal("letters")
    with pytest.raises(InputError, match="a recipe of `gspo train`, and not of `gspo sft`"):
        settings.load_as(Sft, Path(settings.__file__).parent / "recipes" / "tiny.yaml")
