"""The embedded world "storefront": a customer, a small shop's database, three reads, three writes.

In: a request and the day it plays on. Out: 1 when the final database equals the database after the
gold actions and every required output was said, else 0 (tau-bench's rule). Tools do what they are
told: cancelling a shipped order or taking a colour that is out of stock is the agent's mistake to
avoid by looking first.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from agentspec.envs.arguments import call_problem, object_schema, problem_pieces
from agentspec.envs.base import Expert, World
from agentspec.envs.database import Database, digest_rows
from agentspec.envs.storefront_expert import StorefrontExpert, expert_pieces
from agentspec.tasks import storefront as requests
from agentspec.tasks.lookup import FIRST_NAMES, LAST_NAMES
from agentspec.tasks.storefront import Shop
from agentspec.types import Message, Score, Task, ToolCall, ToolSpec

_STRING = {"type": "string"}


def _tool(name: str, description: str, arguments: str, writes: bool = False) -> ToolSpec:
    schema = object_schema({argument: dict(_STRING) for argument in arguments.split()})
    return ToolSpec(name, description, schema, read_only=not writes, repeatable=not writes)


SPECS: tuple[ToolSpec, ...] = (
    _tool("find_user", "The orders of a customer, by full name and zip code.", "name zip"),
    _tool("get_order", "An order's items, their colours, and its status.", "order_id"),
    _tool("get_product", "A product's price and which colours are in stock.", "product"),
    _tool("cancel_order", "Cancels an order. Only for pending orders.", "order_id", writes=True),
    _tool(
        "return_item",
        "Takes an item of a delivered order back and refunds it.",
        "order_id item",
        writes=True,
    ),
    _tool(
        "change_item",
        "Changes an item to another colour. A colour that is out becomes a back order.",
        "order_id item colour",
        writes=True,
    ),
)


@lru_cache(maxsize=64)
def _revision(shop_seed: int, day: int) -> str:
    return digest_rows(requests.base_rows(shop_seed, day))


def open_database(shop_seed: int, day: int) -> Database:
    """The shop's database on the morning of a day; its own copy of whatever it will change."""
    return Database(requests.base_rows(shop_seed, day), _revision(shop_seed, day))


def run_call(database: Database, call: ToolCall) -> str:
    """Runs one call on the database and returns the observation; bad arguments change nothing."""
    problem = call_problem(call, SPECS)
    if problem is not None:
        return problem
    arguments = call.arguments
    if call.name == "find_user":
        return _find_user(database, arguments["name"], arguments["zip"])
    if call.name == "get_product":
        return _get_product(database, arguments["product"])
    key = f"orders/{arguments['order_id']}"
    if key not in database:
        return "error : no such order"
    order = database.get(key)
    if call.name == "get_order":
        items = " , ".join(f"{name} : {_item_text(item)}" for name, item in order["items"].items())
        return f"{items} ; status {order['status']}"
    if order["status"] == "cancelled":
        return "error : order is cancelled"
    if call.name == "cancel_order":
        database.put(key, {**order, "status": "cancelled"})
        return "done"
    name = arguments["item"]
    if name not in order["items"]:
        return "error : no such item"
    if order["items"][name]["returned"]:
        return "error : item is returned"
    if call.name == "return_item":
        order["items"][name]["returned"] = True
        order["refund"] += database.get(f"products/{name}")["price"]
        database.put(key, order)
        return "done"
    return _change_item(database, key, name, arguments["colour"])


def _item_text(item: dict[str, Any]) -> str:
    return "returned" if item["returned"] else str(item["colour"])


def _find_user(database: Database, name: str, zip_code: str) -> str:
    """Linear in the users, of which there are few."""
    for n in range(requests.N_USERS):
        user = database.get(f"users/u{n}")
        if (user["name"], user["zip"]) == (" ".join(name.lower().split()), zip_code):
            return f"orders {' '.join(user['orders'])}"
    return "error : no such user"


def _get_product(database: Database, product: str) -> str:
    key = f"products/{product}"
    if key not in database:
        return "error : no such product"
    row = database.get(key)
    stock = " , ".join(f"{c} {'in' if n > 0 else 'out'}" for c, n in row["stock"].items())
    return f"price {row['price']} ; {stock}"


def _change_item(database: Database, key: str, name: str, colour: str) -> str:
    order, product = database.get(key), database.get(f"products/{name}")
    item = order["items"][name]
    if colour not in product["stock"]:
        return "error : no such colour"
    if colour == item["colour"]:
        return "error : same colour"
    product["stock"][item["colour"]] += 1
    product["stock"][colour] -= 1
    item["colour"] = colour
    database.put(key, order)
    database.put(f"products/{name}", product)
    return "done" if product["stock"][colour] >= 0 else "back order"


def says(said: str, output: str) -> bool:
    """Whether ``output`` stands in what was said, as whole words, in any letter case."""
    return re.search(rf"(?<!\w){re.escape(output.lower())}(?!\w)", said.lower()) is not None


class StorefrontWorld:
    """One episode: the day's database with the changes made so far, and the scripted customer."""

    def __init__(self, shop: Shop) -> None:
        """A world that waits for ``reset``."""
        self.tools: tuple[ToolSpec, ...] = SPECS
        self._shop = shop
        self._task: Task | None = None
        self._database = open_database(shop.seed, 0)
        self._said: tuple[str, ...] = ()

    def reset(self, task: Task) -> list[Message]:
        """Opens the day's database anew; returns the customer's first line."""
        self._task = task
        self._database = open_database(self._shop.seed, task.data["day"])
        self._said = ()
        return [Message("user", task.data["lines"][0])]

    async def step(self, call: ToolCall) -> str:
        """The observation of one call."""
        return run_call(self._database, call)

    async def reply(self, content: str) -> Message | None:
        """The customer's next line, or None when there is none left."""
        task = self._started()
        self._said = (*self._said, content)
        lines = task.data["lines"]
        return Message("user", lines[len(self._said)]) if len(self._said) < len(lines) else None

    def fork(self) -> StorefrontWorld:
        """An independent copy, at the cost of the changed rows."""
        twin = object.__new__(StorefrontWorld)
        twin.tools, twin._shop, twin._task, twin._said = SPECS, self._shop, self._task, self._said
        twin._database = self._database.fork()
        return twin

    @property
    def state_version(self) -> str:
        """Digest of the day's rows and the changed ones."""
        return self._database.version

    def score(self) -> Score:
        """Database equal to gold and all outputs said; ``vacuous`` tasks are marked in details."""
        task = self._started()
        gold = open_database(self._shop.seed, task.data["day"])
        for action in task.data["gold"]:
            seen = run_call(gold, ToolCall(action["name"], action["arguments"]))
            if seen.startswith("error"):
                raise ValueError(f"storefront: gold action of {task.id} fails: {action} -> {seen}")
        database = gold.version == self._database.version
        said = all(says("\n".join(self._said), output) for output in task.data["outputs"])
        success = float(database and said)
        details = {"database": database, "said": said, "vacuous": task.data["vacuous"]}
        return Score(success, success, details)

    def _started(self) -> Task:
        if self._task is None:
            raise RuntimeError("storefront: used before reset()")
        return self._task


class StorefrontWorlds:
    """Maker of storefront episodes over one shop."""

    def __init__(self, shop: Shop) -> None:
        """Keeps the shop; databases are opened per episode."""
        self.specs: tuple[ToolSpec, ...] = SPECS
        self.shop = shop

    def new(self) -> World:
        """A fresh world."""
        return StorefrontWorld(self.shop)

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split."""
        return requests.build_tasks(self.shop, split)

    def expert_tasks(self) -> list[Task]:
        """The tasks to imitate the expert on: those of the training split."""
        return self.tasks("train")

    def expert(self, task: Task, seed: int) -> Expert:
        """The scripted policy for one episode."""
        return StorefrontExpert(task, seed)

    def pieces(self) -> list[str]:
        """Text pieces of the world and its expert: names, ids, digits, glue."""
        names = [*FIRST_NAMES, *LAST_NAMES, *requests.PRODUCTS, *requests.COLOURS]
        names += [*requests.ORDER_HEADS, *"0123456789", *(s for _, s in requests.STATUSES)]
        glue = [
            "i am ", " , zip ", " . change the ", " in order ", " in my order", " to ", " , or ",
            " if that is out .", " . cancel order ", " . cancel my order", " with the ", " .",
            " , or return it if delivered .", " . what is the status of ", "order ", "my order",
            " ?", "cancel it if pending .", " . what does the ", " cost ?", "orders ", " ", " : ",
            " , ", " ; ", " ; status ", "price ", " in", " out", "done", "back order", "cancelled",
            "returned", "error : ", "no such ", "user", "order", "item", "colour", "product",
            "same ", " is ", "order_id", "name", "zip",
        ]  # fmt: skip
        return [*names, *glue, *expert_pieces(), *problem_pieces(SPECS)]


def build_world(seed: int = 0) -> StorefrontWorlds:
    """The maker of storefront episodes for one shop seed."""
    return StorefrontWorlds(requests.build_shop(seed))
