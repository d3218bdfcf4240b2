"""The scripted agent of the world "storefront".

It understands the request and learns everything else from observations. At each turn it weighs
what it could do next: the read it needs, a read out of habit, two reads at once, or acting without
having looked. Several orders of reading are equally good; acting blind is sometimes wrong.
"""

from __future__ import annotations

from typing import Any

from agentspec.envs.experts import AssistantAct, as_list
from agentspec.tasks.hashing import pick
from agentspec.types import Task, ToolCall

# Weights of the options of one turn; they are normalised over those that make sense.
NEEDED = 1.0
FIRST_ORDER, SECOND_ORDER, BOTH_ORDERS = 0.55, 0.40, 0.25
HABIT = 0.40  # a read that cannot help
TWO_READS = 0.35
BLIND = 0.50
READY = 1.4
REPAIRS = 0.35  # chance to undo a back order

Option = tuple[float, tuple[str, tuple[ToolCall, ...]]]


class StorefrontExpert:
    """Plays one episode; every choice is a hash of (seed, task, turn)."""

    def __init__(self, task: Task, seed: int) -> None:
        """Knows what the customer's lines say, and nothing of the database."""
        self.task = task
        self.seed = seed
        self._data: dict[str, Any] = task.data
        self._turn = 0
        self._pending: tuple[ToolCall, ...] = ()
        self._orders: list[str] | None = None
        self._viewed: dict[str, tuple[list[str], str]] = {}  # order -> products, status
        self._stock: dict[str, bool] | None = None
        self._price = ""
        self._written = ""  # the observation of the last write
        self._answered = False

    def act(self, observations: list[str] | str | None) -> AssistantAct:
        """The next turn: reads, a write, or words to the customer."""
        for call, text in zip(self._pending, as_list(observations), strict=False):
            self._take_in(call, text)
        self._turn += 1
        words = self._words()
        if words is not None:
            self._pending = ()
            return AssistantAct(*words)
        thought, calls = pick(self._options(), self.seed, self.task.id, self._turn, "option")
        self._pending = calls
        return AssistantAct(thought, "", calls)

    def _take_in(self, call: ToolCall, text: str) -> None:
        if text.startswith("error"):
            self._written = self._written or text
        elif call.name == "find_user":
            self._orders = text.split()[1:]
        elif call.name == "get_order":
            items, _, status = text.partition(" ; status ")
            products = [item.partition(" : ")[0] for item in items.split(" , ")]
            self._viewed[call.arguments["order_id"]] = (products, status)
        elif call.name == "get_product":
            price, _, stock = text.partition(" ; ")
            self._price = price.removeprefix("price ")
            self._stock = {c: s == "in" for c, s in (part.split() for part in stock.split(" , "))}
        else:
            self._written = text

    def _order(self) -> str | None:
        """The order in question, as far as it is known: named, seen, or left over."""
        if self._data["order"]:
            return str(self._data["order"])
        for order, (products, _) in self._viewed.items():
            if self._data["product"] in products:
                return order
        left = [order for order in self._orders or [] if order not in self._viewed]
        return left[0] if len(left) == 1 else None

    def _status(self) -> str | None:
        order = self._order()
        return self._viewed[order][1] if order in self._viewed else None

    def _words(self) -> tuple[str, str] | None:
        """Thought and words of a turn without calls, or None when there is still work."""
        kind, status = self._data["kind"], self._status()
        if self._written == "back order" and self._key_below(REPAIRS):
            return None
        if self._written:
            return "that is all .", "done ."
        if kind == "price" and self._price:
            return "price is known .", f"it costs {self._price} ."
        if kind == "status" and status and not self._answered:
            self._answered = True
            return "status is known .", f"it is {status} ."
        if kind in ("cancel", "status") and status and status != "pending":
            return f"status is {status} , so no .", f"it is {status} , i can not cancel it ."
        return None

    def _key_below(self, chance: float) -> bool:
        options = [(chance, True), (1 - chance, False)]
        return pick(options, self.seed, self.task.id, "repair")

    def _options(self) -> list[Option]:
        """Weighted things to do next."""
        kind, product = self._data["kind"], self._data["product"]
        order = self._order()
        look = f"look at the {product} .", (ToolCall("get_product", {"product": product}),)
        find = "find the user .", (self._find(),)
        if kind == "price":
            return [(NEEDED, look), (0 if self._orders else 2 * HABIT, find)]
        options: list[Option] = []
        wants_stock = kind == "swap" and self._stock is None
        wants_status = kind != "swap" and self._status() is None
        ready = order is not None and not wants_stock and not wants_status
        if order is None and self._orders is None:
            options.append((NEEDED, find))
        elif order is None:
            first, second = self._orders or ["", ""]
            options += [
                (FIRST_ORDER, self._view(first)),
                (SECOND_ORDER, self._view(second)),
                (BOTH_ORDERS, self._view(first, second)),
            ]
            if kind == "cancel or return":
                options.append((BLIND / 2, self._write(first)))
        elif self._orders is None:
            options.append((HABIT, find))
        if wants_stock:
            options.append((NEEDED, look))
        elif self._stock is None and not ready:
            options.append((HABIT, look))
        if order is not None and order not in self._viewed:
            options.append((NEEDED if wants_status else HABIT, self._view(order)))
            if wants_stock:
                both = f"look at order {order} and the {product} ."
                options.append((TWO_READS, (both, self._view(order)[1] + look[1])))
        if order is not None and (kind != "status" or self._answered):
            options.append((READY if ready else BLIND, self._write(order)))
        return options

    def _find(self) -> ToolCall:
        return ToolCall("find_user", {"name": self._data["name"], "zip": self._data["zip"]})

    def _view(self, *orders: str) -> tuple[str, tuple[ToolCall, ...]]:
        calls = tuple(ToolCall("get_order", {"order_id": order}) for order in orders)
        return f"look at order {' and '.join(orders)} .", calls

    def _write(self, order: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The write as far as it can be judged, with its reason."""
        data, arguments = self._data, {"order_id": order}
        if data["kind"] == "swap":
            out = self._written == "back order" or not (self._stock or {}).get(data["want"], True)
            colour = data["else"] if out else data["want"]
            thought = f"{data['want']} is out , so take {colour} ." if out else f"take {colour} ."
            arguments |= {"item": data["product"], "colour": colour}
            return thought, (ToolCall("change_item", arguments),)
        status = self._viewed[order][1] if order in self._viewed else None
        if data["kind"] == "cancel or return" and status == "delivered":
            arguments |= {"item": data["product"]}
            return f"status is {status} , so return it .", (ToolCall("return_item", arguments),)
        thought = f"status is {status} , so cancel it ." if status else "just cancel it ."
        return thought, (ToolCall("cancel_order", arguments),)


def expert_pieces() -> list[str]:
    """Text pieces of the expert's thoughts, words and calls."""
    glue = {
        "find_user": "name", "get_order": "order_id", "get_product": "product",
        "cancel_order": "order_id", "return_item": "order_id", "change_item": "order_id",
    }  # fmt: skip
    opened = [f'{{"name": "{tool}", "arguments": {{"{key}": "' for tool, key in glue.items()]
    thoughts = [
        "find the user .", "look at the ", "look at order ", "take ", "status is ",
        "that is all .", "price is known .", "status is known .", "just cancel it .",
    ]  # fmt: skip
    return [
        *opened, *(f"\n{piece}" for piece in opened), *thoughts, *(f"\n{t}" for t in thoughts),
        '", "zip": "', '", "item": "', '", "colour": "', '"}}', '"}}\n', " and the ", " and ",
        "order ", " is out , so take ", " .", " .\n", "\n", "\n\n", " , so cancel it .",
        " , so return it .", " , so no .", "it costs ", "it is ", " , i can not cancel it .",
        "done .",
    ]  # fmt: skip
