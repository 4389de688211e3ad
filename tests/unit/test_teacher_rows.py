"""What teachers read: prompts of their own, and which teacher scores a row."""

import types

import numpy as np
import pytest
import trajectories
from learners import VOCAB, dense, stage

import rl.algorithms
from rl.config.model import TeacherOptions
from rl.data.encoded import Example, Problem
from rl.errors import DataError
from rl.stages.sampling import batches
from rl.stages.sampling.teacher_prompt import TeacherPrompt
from rl.stages.sampling.teacher_rows import check_rows, teacher_logprobs, with_prompt
from rl.training.teachers.frozen import FrozenModel
from rl.training.teachers.scorer import TeacherScorer
from rl.training.trainer import Trainer
from rollout import Completion

LIMIT = 16


def encode(example):
    """One token for each letter, of a text or of all messages."""
    texts = (
        [example.prompt]
        if isinstance(example.prompt, str)
        else [each["content"] for each in example.prompt]
    )
    return [ord(letter) % VOCAB for text in texts for letter in text]


def prompt(template):
    return TeacherPrompt(template, encode)


def test_names_in_braces_stand_for_the_row():
    example = Example("1+1", completion="2", columns={"answer": 2, "__class__": "x"}, where="row 1")
    template = "{answer} {completion}: {prompt} {other}"
    with pytest.raises(DataError, match=r"row 1: teacher.prompt names \{other\}"):
        prompt(template).ids(example)
    text = "2 2: 1+1 and {no name} {}"
    made = prompt("{answer} {completion}: {prompt} and {no name} {}").ids(example)
    assert made == encode(Example(text))
    assert prompt("{prompt}{success}").reads_success and not prompt("{prompt}").reads_success


def test_of_a_conversation_the_last_user_message_is_replaced():
    messages = [
        {"role": "system", "content": "be brief. "},
        {"role": "user", "content": "one? "},
        {"role": "assistant", "content": "1. "},
        {"role": "user", "content": "two?"},
    ]
    example = Example(messages, columns={"hint": "2"})
    expected = encode(Example("be brief. one? 1. two? It is 2"))
    assert prompt("{prompt} It is {hint}").ids(example) == expected
    assert messages[-1]["content"] == "two?"
    with pytest.raises(DataError, match="last user message"):
        prompt("{prompt}").ids(Example(messages[:1]))


def rollouts(seed=0):
    """Two prompts with three completions of 1 to 4 tokens each."""
    rng = np.random.default_rng(seed)
    problems = [
        Problem(Example(text, columns={"kind": kind}), encode(Example(text)))
        for text, kind in (("ab", "x"), ("cde", "y"))
    ]
    completions = [
        [
            Completion(
                tokens=rng.integers(0, VOCAB, length).tolist(),
                logprobs=[-1.0] * length,
                finish="stop",
                text=f"{problem.example.prompt}{length}",
            )
            for length in (2, 4, 1)
        ]
        for problem in problems
    ]
    return trajectories.rollouts(problems, [0, 1], completions)


def test_completions_come_back_to_the_places_of_the_step():
    """Whose prompt has another length."""
    made = rollouts()
    own = batches.to_batch(made, LIMIT)
    rows = with_prompt(prompt("{prompt}, hint {kind}"), made, None, 1.0, LIMIT)
    assert [row for row, *_ in rows.starts] == [*range(6)]
    back = rows.back(rows.batch.tokens.astype(np.float32), own.tokens.shape)
    written = own.mask != 0
    np.testing.assert_array_equal(back[written], own.tokens[written])
    assert np.isnan(back[~written]).all()
    hint = encode(Example("ab, hint x"))
    assert rows.batch.tokens[0, : len(hint)].tolist() == hint
    assert rows.batch.prompt.tolist() == [0, 0, 0, 1, 1, 1]


def test_another_completion_of_the_group_that_succeeded_is_shown():
    """The first one, never itself, as TRL's SDPO takes it. Without one, or without room, no teacher
    reads the completion."""
    made = rollouts()
    totals = np.array([1.0, 0.0, 2.0, 0.0, 1.0, np.nan])
    rows = with_prompt(prompt("{success}:{prompt}"), made, totals, 1.0, LIMIT)
    shown = {row: rows.batch.tokens[row, :read].tolist() for row, _, read, _ in rows.starts}
    texts = {0: "ab1:ab", 1: "ab2:ab", 2: "ab2:ab", 3: "cde4:cde", 5: "cde4:cde"}
    assert shown == {row: encode(Example(text)) for row, text in texts.items()}
    assert not rows.batch.segments[4].any() and rows.batch.prompt[4] == -1
    narrow = with_prompt(prompt("{success}:{prompt}"), made, totals, 1.0, 9)
    assert [row for row, *_ in narrow.starts] == [0, 2, 5]
    none = with_prompt(prompt("{success}"), made, np.zeros(6), 1.0, LIMIT)
    assert not none.starts


def stage_of(options, scorers=(), template=None):
    """What `teacher_logprobs` reads of a stage."""
    trainer = Trainer(dense().graph, stage("opd"), rl.algorithms.get("opd"))
    return types.SimpleNamespace(
        teacher=TeacherOptions(**options),
        teacher_prompt=None if template is None else prompt(template),
        teacher_scorers=scorers,
        trainer=trainer,
        config=types.SimpleNamespace(max_length=LIMIT),
    )


def alone(params, ids, written):
    """Log-probabilities of the last `written` tokens of a sequence."""
    model = type(dense())(dense().graph, params)
    logp, _ = model.logprobs(np.array([ids], np.int32))
    return np.asarray(logp)[0, -written:]


def test_the_policy_with_a_hint_scores_its_own_completions():
    made = rollouts()
    own = batches.to_batch(made, LIMIT)
    template = "{prompt} {kind}"
    options = {"source": "policy", "prompt": template}
    policy = types.SimpleNamespace(params=dense().params)
    state = types.SimpleNamespace(policy=policy, reference=None)
    logp = teacher_logprobs(stage_of(options, template=template), state, own, made)
    for row, trajectory in enumerate(made.trajectories):
        example = made.groups[row // 3].problem.example
        ids = [*prompt(template).ids(example), *trajectory.new_tokens]
        n = len(trajectory.new_tokens)
        np.testing.assert_allclose(
            logp[row, own.mask[row] != 0], alone(dense().params, ids, n), atol=2e-5
        )


def test_each_row_is_scored_by_the_teacher_of_its_column():
    made = rollouts()
    own = batches.to_batch(made, LIMIT)
    scorers = []
    for source, seed in (("one", 3), ("other", 4)):
        scorer = TeacherScorer(source, FrozenModel(dense().graph, seed=seed), 1.0, VOCAB)
        scorer.read()
        scorers.append(scorer)
    options = {"by": "kind", "sources": {"x": "other", "y": "one"}}
    logp = teacher_logprobs(stage_of(options, scorers), None, own, made)
    for row, trajectory in enumerate(made.trajectories):
        params = scorers[1 if row < 3 else 0].params
        (segment,) = trajectory.segments
        n = len(trajectory.new_tokens)
        expected = alone(params, segment.tokens, n)
        np.testing.assert_allclose(logp[row, own.mask[row] != 0], expected, atol=2e-5)
    assert np.isfinite(logp).all()


def test_rows_without_a_teacher_and_prompts_without_room_are_refused():
    problems = [group.problem for group in rollouts().groups]
    several = TeacherOptions(by="kind", sources={"x": "one"})
    with pytest.raises(DataError, match="kind is 'y', and teacher.sources has no teacher for it"):
        check_rows(several, None, problems, LIMIT)
    hinted = TeacherOptions(source="policy", prompt="{prompt} and a long hint")
    with pytest.raises(DataError, match="the prompt of the teacher has 18 tokens"):
        check_rows(hinted, prompt(hinted.prompt), problems, LIMIT)
    with pytest.raises(ValueError, match="`sources` and `by` go together"):
        TeacherOptions(sources={"x": "one"})
