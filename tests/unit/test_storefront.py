"""The embedded world "storefront": database, tools, reward, requests, scripted expert."""

from __future__ import annotations

import asyncio
import copy
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.envs import lookup, storefront
from agentspec.envs.base import World
from agentspec.envs.database import Database, canonical_text
from agentspec.tasks.storefront import KINDS, base_rows, request_of
from agentspec.types import Task, ToolCall

WORLDS = storefront.build_world(seed=0)
SHOP = WORLDS.shop
SPLITS = {split: WORLDS.tasks(split) for split in ("train", "validation", "test")}
TRAIN = SPLITS["train"]


def step(world, name, /, **arguments):
    return asyncio.run(world.step(ToolCall(name, arguments)))


def opened(task):
    world = WORLDS.new()
    world.reset(task)
    return world


def task_of(kind, **wanted):
    return next(
        t
        for t in TRAIN
        if t.data["kind"] == kind and all(t.data[k] == v for k, v in wanted.items())
    )


def play(task, seed, max_turns=9):
    """Plays an episode; returns its score, the acts, and all observations and customer lines."""
    world, expert = WORLDS.new(), WORLDS.expert(task, seed)
    texts = [world.reset(task)[0].content]
    acts, back = [], None
    for _ in range(max_turns):
        act = expert.act(back)
        acts.append(act)
        if act.calls:
            back = [asyncio.run(world.step(call)) for call in act.calls]
            texts += back
            continue
        line = asyncio.run(world.reply(act.content))
        if line is None:
            break
        back = line.content
        texts.append(back)
    return world.score(), acts, texts


# --- database --------------------------------------------------------------------------------


def test_b83_rows_compare_by_canonical_value():
    def version(amount):
        database = Database({"a": {"amount": 33}})
        database.put("a", {"amount": amount})
        return database.version

    assert version(33.0) == version(33) == Database({"a": {"amount": 33}}).version
    assert len({version(v) for v in (33, "33", 33.5, True, None)}) == 5
    assert Database({"a": {"n": 33}}).version == Database({"a": {"n": 33.0}}).version
    assert canonical_text({"b": 1, "a": [1.0]}) == canonical_text({"a": [1], "b": 1})
    assert canonical_text({"a": [1, 2]}) != canonical_text({"a": [2, 1]})


rows = st.dictionaries(st.sampled_from("pqr"), st.integers(0, 2) | st.text(max_size=2), max_size=3)
writes = st.lists(st.tuples(st.sampled_from("abcd"), rows), max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), rows, min_size=1), writes, writes)
def test_undone_writes_give_the_old_version_back(base, before, after):
    database = Database(base)
    for key, row in before:
        database.put(key, row)
    version = database.version
    saved = {key: database.get(key) for key in "abcd" if key in database}
    for key, row in after:
        if key in saved:  # a new row cannot be taken back: there is no delete
            database.put(key, row)
    same = all(database.get(key) == row for key, row in saved.items())
    assert (database.version == version) == same
    for key, row in saved.items():
        database.put(key, row)
    assert database.version == version


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(range(3)), max_size=6))
def test_item_changes_undone_give_the_old_state_version_back(picks):
    task = task_of("swap")
    world, product = opened(task), task.data["product"]
    order = task.data["gold"][0]["arguments"]["order_id"]
    colours = SHOP.products[product][1]
    old = world.state_version
    for index in picks:
        step(world, "change_item", order_id=order, item=product, colour=colours[index])
    bought = SHOP.orders[order][product]
    step(world, "change_item", order_id=order, item=product, colour=bought)
    assert world.state_version == old


def test_versions_tell_days_apart_and_forks_cost_their_changes():
    task = task_of("cancel or return", order=None)
    world = opened(task)
    versions = {opened(Task("t", "w", {**task.data, "day": d})).state_version for d in range(40)}
    assert len(versions) == 40
    fork = world.fork()
    assert fork.state_version == world.state_version
    order = task.data["gold"][0]["arguments"]["order_id"]
    assert step(fork, "cancel_order", order_id=order) == "done"
    assert fork.state_version != world.state_version
    assert fork._database._base is world._database._base
    assert fork._database.changed == (f"orders/{order}",) and world._database.changed == ()
    second = fork.fork()
    step(second, "return_item", order_id=next(o for o in SHOP.orders if o != order), item="lamp")
    assert "cancelled" in step(fork, "get_order", order_id=order)
    assert "cancelled" not in step(world, "get_order", order_id=order)


def test_b85_episodes_share_no_state():
    task = task_of("swap")
    rows_before = copy.deepcopy(base_rows(SHOP.seed, task.data["day"]))
    first, second = opened(task), opened(task)
    clean = first.state_version
    for action in task.data["gold"]:
        step(first, action["name"], **action["arguments"])
    first._database.get("products/lamp")["stock"]["red"] = 99  # a copy: nothing happens
    assert first.state_version != clean == second.state_version
    assert base_rows(SHOP.seed, task.data["day"]) == rows_before
    first.reset(task)
    assert first.state_version == clean


# --- tools -----------------------------------------------------------------------------------


def test_tools_show_the_rows_of_the_day():
    task = task_of("swap")
    data, world = task.data, opened(task)
    user = SHOP.users[data["user"]]
    assert step(world, "find_user", name=data["name"], zip=data["zip"]) == (
        f"orders {user['orders'][0]} {user['orders'][1]}"
    )
    order = data["gold"][0]["arguments"]["order_id"]
    (p, c), (q, d) = SHOP.orders[order].items()
    status = SHOP.status(order, data["day"])
    assert step(world, "get_order", order_id=order) == f"{p} : {c} , {q} : {d} ; status {status}"
    price, colours = SHOP.products[data["product"]]
    shown = " , ".join(
        f"{x} {'in' if SHOP.stock(data['product'], x, data['day']) else 'out'}" for x in colours
    )
    assert step(world, "get_product", product=data["product"]) == f"price {price} ; {shown}"


def test_the_same_name_needs_the_zip_code():
    names = Counter(user["name"] for user in SHOP.users.values())
    name = next(n for n, count in names.items() if count == 2)
    twins = [user for user in SHOP.users.values() if user["name"] == name]
    found = {step(WORLDS.new(), "find_user", name=name, zip=t["zip"]) for t in twins}
    assert len(found) == 2
    assert step(WORLDS.new(), "find_user", name=name, zip="xyz") == "error : no such user"
    assert all(len(user["zip"]) == 3 for user in SHOP.users.values())
    assert any(user["zip"].startswith("0") for user in SHOP.users.values())


def test_writes_do_what_they_are_told_once():
    world = opened(task_of("swap"))
    order = next(iter(SHOP.orders))
    product, other = SHOP.orders[order]
    colour = SHOP.orders[order][product]
    assert step(world, "change_item", order_id=order, item=product, colour=colour) == (
        "error : same colour"
    )
    assert step(world, "change_item", order_id=order, item=product, colour="pink") == (
        "error : no such colour"
    )
    assert step(world, "return_item", order_id=order, item="sofa") == "error : no such item"
    assert step(world, "return_item", order_id=order, item=product) == "done"
    assert world._database.get(f"orders/{order}")["refund"] == SHOP.products[product][0]
    assert step(world, "return_item", order_id=order, item=product) == "error : item is returned"
    assert f"{product} : returned" in step(world, "get_order", order_id=order)
    assert step(world, "cancel_order", order_id=order) == "done"
    version = world.state_version
    assert step(world, "return_item", order_id=order, item=other) == "error : order is cancelled"
    assert step(world, "cancel_order", order_id="ka99") == "error : no such order"
    assert step(world, "get_product", product="sofa") == "error : no such product"
    assert world.state_version == version


def test_a_colour_that_is_out_becomes_a_back_order():
    order, product, colour, day = next(
        (o, p, c, d)
        for d in range(5)
        for o, items in SHOP.orders.items()
        for p in items
        for c in SHOP.products[p][1]
        if c != items[p] and SHOP.stock(p, c, d) == 0
    )
    world = opened(Task("t", "w", {"day": day, "lines": ["hello ."]}))
    seen = step(world, "change_item", order_id=order, item=product, colour=colour)
    assert seen == "back order"
    assert world._database.get(f"products/{product}")["stock"][colour] == -1


@pytest.mark.parametrize(
    ("name", "arguments", "observation"),
    [
        ("refund", {}, "error : no tool refund"),
        ("get_order", {}, "error : missing order_id"),
        ("get_order", {"order_id": 7}, "error : order_id must be a string"),
        ("find_user", {"name": "mira sol"}, "error : missing zip"),
        ("find_user", {"name": "mira sol", "zip": 47}, "error : zip must be a string"),
        ("cancel_order", {"order_id": None}, "error : order_id must be a string"),
        ("cancel_order", {"order_id": "ka7", "reason": "x"}, "error : unknown reason"),
        ("return_item", {"order_id": "ka7", "item": {"a": 1}}, "error : item must be a string"),
    ],
)
def test_malformed_calls_get_a_clear_observation_and_change_nothing(name, arguments, observation):
    world = WORLDS.new()
    version = world.state_version
    assert step(world, name, **arguments) == observation
    assert world.state_version == version


def test_only_reads_may_run_early():
    world = WORLDS.new()
    assert isinstance(world, World)
    early = {spec.name for spec in world.tools if spec.preexecutable}
    assert early == {"find_user", "get_order", "get_product"}
    version = world.state_version
    order = next(iter(SHOP.orders))
    calls = [("get_order", {"order_id": order}), ("get_product", {"product": "lamp"})]
    first = [step(world, name, **arguments) for name, arguments in calls]
    assert [step(world, name, **arguments) for name, arguments in calls] == first
    assert world.state_version == version


# --- requests --------------------------------------------------------------------------------


def test_splits_are_large_enough_and_disjoint_by_content():
    assert len(TRAIN) >= 2000
    assert len(SPLITS["test"]) >= 400 and len(SPLITS["validation"]) >= 128
    requests = {split: {request_of(t.data) for t in tasks} for split, tasks in SPLITS.items()}
    assert not requests["train"] & requests["test"]
    assert not requests["train"] & requests["validation"]
    assert not requests["validation"] & requests["test"]
    for tasks in SPLITS.values():
        assert len({(t.data["day"], *t.data["lines"]) for t in tasks}) == len(tasks)
    assert storefront.build_world(0).tasks("test") == SPLITS["test"]
    assert storefront.build_world(1).tasks("test") != SPLITS["test"]
    assert {t.data["kind"] for t in SPLITS["test"]} == {kind for _, kind in KINDS}
    with pytest.raises(ValueError, match="split is 'dev'"):
        WORLDS.tasks("dev")


def test_gold_actions_follow_from_the_request_and_the_day():
    """An independent reading of the request's text against the day's rows."""
    for task in TRAIN[:600]:
        data, day = task.data, task.data["day"]
        rows, line = base_rows(SHOP.seed, day), task.data["lines"][0]
        order = next(o for o in SHOP.users[data["user"]]["orders"]
                     if data["product"] in SHOP.orders[o])  # fmt: skip
        status = rows[f"orders/{order}"]["status"]
        if "change the" in line:
            want, other = line.split(" to ")[1].removesuffix(" if that is out .").split(" , or ")
            stock = rows[f"products/{data['product']}"]["stock"]
            colour = want if stock[want] > 0 else other
            assert stock[colour] > 0
            expected = [("change_item", {"order_id": order, "item": data["product"],
                                         "colour": colour})]  # fmt: skip
        elif "return it if delivered" in line:
            assert status in ("pending", "delivered")
            expected = [("cancel_order", {"order_id": order})]
            if status == "delivered":
                expected = [("return_item", {"order_id": order, "item": data["product"]})]
        elif "cost" in line:
            expected = []
            assert data["outputs"] == [str(rows[f"products/{data['product']}"]["price"])]
        else:
            expected = [("cancel_order", {"order_id": order})] if status == "pending" else []
            assert data["outputs"] == ([status] if "status" in line else [])
        assert [(a["name"], a["arguments"]) for a in data["gold"]] == expected


def test_b87_vacuous_tasks_are_marked_and_few():
    """A do-nothing agent passes exactly the marked tasks."""
    for task in SPLITS["test"]:
        world = opened(task)
        asyncio.run(world.reply("hello ."))
        assert world.score().success == float(task.data["vacuous"])
        assert world.score().details["vacuous"] == task.data["vacuous"]
    for tasks in SPLITS.values():
        assert 0 < sum(t.data["vacuous"] for t in tasks) <= 0.08 * len(tasks)


# --- reward ----------------------------------------------------------------------------------


def test_reward_of_gold_wrong_extra_and_undone_writes():
    task = task_of("swap")
    gold = task.data["gold"][0]["arguments"]
    bought = SHOP.orders[gold["order_id"]][gold["item"]]
    wrong = next(c for c in (task.data["want"], task.data["else"]) if c != gold["colour"])
    world = opened(task)
    assert world.score().success == 0.0
    step(world, "change_item", **gold)
    assert world.score().success == 1.0
    step(world, "change_item", **{**gold, "colour": wrong})
    assert world.score().success == 0.0
    step(world, "change_item", **{**gold, "colour": bought})
    step(world, "change_item", **gold)
    assert world.score().success == 1.0  # the way does not matter, the final rows do
    other = next(o for o in SHOP.orders if o != gold["order_id"])
    step(world, "cancel_order", order_id=other)
    assert world.score().success == 0.0


@pytest.mark.parametrize(
    ("said", "output", "right"),
    [
        ("it costs 12 .", "12", True),
        ("it costs 112 .", "12", False),
        ("it costs 12.", "12", True),
        ("It is Pending", "pending", True),
        ("it is appending", "pending", False),
        ("", "12", False),
    ],
)
def test_required_outputs_are_whole_words(said, output, right):
    assert storefront.says(said, output) is right


def test_outputs_and_follow_up_line():
    task = task_of("status", outputs=["pending"])
    world = opened(task)
    line = asyncio.run(world.reply("it is pending ."))
    assert (line.role, line.content) == ("user", "cancel it if pending .")
    assert (world.score().details["said"], world.score().success) == (True, 0.0)
    step(world, "cancel_order", **task.data["gold"][0]["arguments"])
    fork = world.fork()
    assert asyncio.run(world.reply("done .")) is None
    assert world.score().success == 1.0
    assert asyncio.run(fork.reply("done .")) is None  # the fork heard the first line too
    silent = opened(task)
    step(silent, "cancel_order", **task.data["gold"][0]["arguments"])
    assert silent.score().details == {"database": True, "said": False, "vacuous": False}
    assert silent.score().success == 0.0
    with pytest.raises(RuntimeError, match="before reset"):
        WORLDS.new().score()


def test_a_gold_action_that_fails_is_a_data_error():
    broken = {**task_of("swap").data, "gold": [{"name": "cancel_order",
                                               "arguments": {"order_id": "nope"}}]}  # fmt: skip
    world = opened(Task("bad-7", "storefront", broken))
    with pytest.raises(ValueError, match="gold action of bad-7 fails"):
        world.score()


# --- expert ----------------------------------------------------------------------------------


def test_expert_success_is_within_its_band():
    played = [play(task, i) for i, task in enumerate(TRAIN[:500])]
    assert 0.80 <= statistics.mean(score.success for score, _, _ in played) <= 0.95
    assert all(acts[-1].calls == () for _, acts, _ in played)
    n_calls = [sum(len(a.calls) for a in acts) for _, acts, _ in played]
    assert 2.5 <= statistics.mean(n_calls) <= 4 and max(n_calls) <= 9
    assert any(len(a.calls) == 2 for _, acts, _ in played for a in acts)
    assert play(TRAIN[4], 4)[1] == played[4][1]


def test_looking_first_is_better_than_acting_blind():
    """What reinforcement can sharpen: swaps without a look at the product fail far more often."""
    outcomes = {True: [], False: []}
    for i, task in enumerate([t for t in TRAIN if t.data["kind"] == "swap"][:300]):
        score, acts, _ = play(task, i)
        names = [call.name for act in acts for call in act.calls]
        looked = "get_product" in names[: names.index("change_item")]
        outcomes[looked].append(score.success)
    assert statistics.mean(outcomes[True]) == 1.0
    assert len(outcomes[False]) >= 20
    assert statistics.mean(outcomes[False]) <= 0.85


def test_expert_first_calls_vary():
    agreement = []
    for task in TRAIN[:80]:
        expert = WORLDS.expert(task, 0)
        counts = Counter()
        for seed in range(30):
            fresh = copy.deepcopy(expert)
            fresh.seed = seed
            counts[str(fresh.act(None).calls[:1])] += 1
        agreement.append(sum(n * (n - 1) for n in counts.values()) / (30 * 29))
    assert 0.35 <= statistics.mean(agreement) <= 0.6


def test_pieces_spell_every_text_in_few_tokens():
    both = set(WORLDS.pieces()) | set(lookup.build_world().pieces()) | {"user\n"}
    longest = sorted(both, key=len, reverse=True)
    lengths = []
    for i, task in enumerate(TRAIN[:60]):
        _, acts, returned = play(task, i)
        texts = [f"user\n{text}" for text in returned[:1]]
        texts += [f"\n{text}\n" for text in returned[1:]]
        texts += [f"\n{act.thinking}\n" for act in acts] + [act.content for act in acts]
        n = 0
        for text in texts:
            while text:
                piece = next((p for p in longest if text.startswith(p)), None)
                assert piece is not None, text
                text, n = text[len(piece) :], n + 1
        lengths.append(n)
    assert max(lengths) < 120
