"""The invented shop and the requests of the embedded world "storefront".

In: a seed. Out: a shop of 60 users, 120 orders and 16 products, and customers' requests with their
gold actions, in three splits that share no request. Order statuses and stock change with the day
that a task plays on, so a policy must look and cannot remember. Stands in for tau-bench retail.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from agentspec.tasks.hashing import ordered, pick, stable_hash, uniform
from agentspec.tasks.lookup import FIRST_NAMES, LAST_NAMES
from agentspec.types import Task

SPLITS = {"train": 0.80, "validation": 0.06, "test": 0.14}
N_DRAWS = 5000
N_DAYS = 40
N_USERS = 60

PRODUCTS = tuple(
    "lamp chair scarf kettle clock basket mug rug kite drum vase bench tent radio hat "
    "pillow".split()
)
COLOURS = tuple("red blue green black white amber".split())
ORDER_HEADS = tuple("ka mo ti zu be fo ny ra sel dax pim vor".split())
STATUSES = ((0.45, "pending"), (0.2, "shipped"), (0.35, "delivered"))
# The kinds of request: how often, and the share of its tasks that name the order by its id.
KINDS = ((0.42, "swap"), (0.30, "cancel or return"), (0.10, "status"), (0.10, "price"),
         (0.08, "cancel"))  # fmt: skip
NAMED_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Shop:
    """What stays the same on all days."""

    seed: int
    users: dict[str, dict[str, Any]]  # id -> name, zip, orders
    orders: dict[str, dict[str, str]]  # id -> product -> colour
    products: dict[str, tuple[int, tuple[str, ...]]]  # name -> price, colours

    def status(self, order: str, day: int) -> str:
        """The status of an order on a day."""
        return pick(STATUSES, self.seed, "status", order, day)

    def stock(self, product: str, colour: str, day: int) -> int:
        """How many pieces there are on a day; 0 for about half of all colours."""
        point = stable_hash(self.seed, "stock", product, colour, day) % 8
        return max(0, point - 3)


@lru_cache(maxsize=8)
def build_shop(seed: int = 0) -> Shop:
    """The shop of one seed: each user has two orders of two products, no product twice."""
    names = ordered([a + b for a in FIRST_NAMES for b in LAST_NAMES], seed, "user")
    ids = ordered([f"{head}{n}" for head in ORDER_HEADS for n in range(10)], seed, "order")
    products = {
        name: (
            10 + stable_hash(seed, "price", name) % 90,
            tuple(ordered(COLOURS, seed, "colours", name)[:3]),
        )
        for name in PRODUCTS
    }
    users: dict[str, dict[str, Any]] = {}
    orders: dict[str, dict[str, str]] = {}
    for n in range(N_USERS):
        # Every tenth user shares the name of the one before, so a name alone is not enough.
        name = names[n - 1] if n % 10 == 9 else names[n]
        zip_code = f"{stable_hash(seed, 'zip', n) % 1000:03d}"
        own = ids[2 * n : 2 * n + 2]
        users[f"u{n}"] = {"name": name, "zip": zip_code, "orders": own}
        bought = ordered(PRODUCTS, seed, "bought", n)
        for order, pair in zip(own, (bought[:2], bought[2:4]), strict=True):
            orders[order] = {p: products[p][1][stable_hash(seed, order, p) % 3] for p in pair}
    return Shop(seed, users, orders, products)


@lru_cache(maxsize=64)
def base_rows(shop_seed: int, day: int) -> dict[str, dict[str, Any]]:
    """All database rows of a day, keyed ``users/u1``, ``orders/ka7``, ``products/lamp``.

    The result is shared: never write to it.
    """
    shop = build_shop(shop_seed)
    rows: dict[str, dict[str, Any]] = {f"users/{u}": row for u, row in shop.users.items()}
    for order, items in shop.orders.items():
        rows[f"orders/{order}"] = {
            "status": shop.status(order, day),
            "items": {p: {"colour": c, "returned": False} for p, c in items.items()},
            "refund": 0,
        }
    for product, (price, colours) in shop.products.items():
        stock = {colour: shop.stock(product, colour, day) for colour in colours}
        rows[f"products/{product}"] = {"price": price, "stock": stock}
    return rows


def build_tasks(shop: Shop, split: str) -> list[Task]:
    """The split's tasks, distinct by content.

    ``data``: ``day``, ``kind``, ``lines`` (what the customer says, one a reply), ``user``,
    ``name``, ``zip``, ``order`` (None where only the product is named), ``product``, ``want`` and
    ``else`` (colours), ``gold`` (the right writes), ``outputs`` (what must be said) and
    ``vacuous`` (an agent that does nothing passes). Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"storefront: split is {split!r}; allowed are {sorted(SPLITS)}")
    tasks: list[Task] = []
    seen = set()
    for n in range(N_DRAWS):
        data = _draw(shop, n)
        if data is None or split_of(shop, data) != split:
            continue
        content = (data["day"], tuple(data["lines"]))
        if content not in seen:
            seen.add(content)
            tasks.append(Task(f"storefront-{split}-{len(tasks)}", "storefront", data))
    return tasks


def request_of(data: dict[str, Any]) -> tuple[Any, ...]:
    """What a task asks for, whatever the day and the wording; splits never share one."""
    keys = ("kind", "user", "product", "want", "else")
    return tuple(data[key] for key in keys)


def split_of(shop: Shop, data: dict[str, Any]) -> str:
    """The split that a request belongs to, decided by its content alone."""
    point = uniform(shop.seed, "split", request_of(data))
    for split, share in SPLITS.items():
        point -= share
        if point < 0:
            return split
    return "test"


def _draw(shop: Shop, n: int) -> dict[str, Any] | None:
    """The n-th draw, or None where the shop's state of that day makes it senseless."""
    key = (shop.seed, "task", n)
    kind = pick(KINDS, *key, "kind")
    day = stable_hash(*key, "day") % N_DAYS
    user = f"u{stable_hash(*key, 'user') % N_USERS}"
    person = shop.users[user]
    order = person["orders"][stable_hash(*key, "which") % 2]
    product = sorted(shop.orders[order])[stable_hash(*key, "item") % 2]
    colours = [c for c in shop.products[product][1] if c != shop.orders[order][product]]
    want, other = ordered(colours, *key, "colours")
    status = shop.status(order, day)
    data: dict[str, Any] = {
        "day": day, "kind": kind, "user": user, "name": person["name"], "zip": person["zip"],
        "order": order if uniform(*key, "named") < NAMED_SHARE else None, "product": product,
        "want": None, "else": None, "gold": [], "outputs": [],
    }  # fmt: skip
    where = f"order {data['order']}" if data["order"] else "my order"
    hello = f"i am {person['name']} , zip {person['zip']} ."
    cancel = {"name": "cancel_order", "arguments": {"order_id": order}}
    if kind == "swap":
        data |= {"want": want, "else": other}
        if not shop.stock(product, other, day):
            return None
        taken = want if shop.stock(product, want, day) else other
        arguments = {"order_id": order, "item": product, "colour": taken}
        data["gold"] = [{"name": "change_item", "arguments": arguments}]
        lines = [f"{hello} change the {product} in {where} to {want} , or {other} if that is out ."]
    elif kind == "cancel or return":
        if status == "shipped":
            return None
        back = {"name": "return_item", "arguments": {"order_id": order, "item": product}}
        data["gold"] = [cancel if status == "pending" else back]
        lines = [f"{hello} cancel {where} with the {product} , or return it if delivered ."]
    elif kind == "cancel":
        data["gold"] = [cancel] if status == "pending" else []
        lines = [f"{hello} cancel {where} with the {product} ."]
    elif kind == "status":
        data["outputs"] = [status]
        data["gold"] = [cancel] if status == "pending" else []
        lines = [f"{hello} what is the status of {where} with the {product} ?",
                 "cancel it if pending ."]  # fmt: skip
    else:
        data |= {"order": None, "outputs": [str(shop.products[product][0])]}
        lines = [f"{hello} what does the {product} cost ?"]
    data |= {"lines": lines, "vacuous": not data["gold"] and not data["outputs"]}
    return data
