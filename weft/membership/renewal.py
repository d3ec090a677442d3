"""Rebuild a world after loss or growth.

Ranks agree on the members (`weft.membership`), connect, and make the world. If one of them is lost
meanwhile they do so again.
"""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from weft.bootstrap.endpoint import Endpoint, Handle, Known
from weft.bootstrap.wire import decode, encode
from weft.errors import PeerLost, PeerTimeout
from weft.membership import agreement
from weft.membership.agreement import Agreement, LateResponder
from weft.membership.decision import Decision, Membership
from weft.membership.view import View

_LONGEST = 8 << 20  # bytes of a text that was compressed: thousands of handles
World = TypeVar("World")
Kind = TypeVar("Kind")
Make = Callable[[Known, Endpoint, Sequence[int]], World]
"""Makes the world of ranks that have each other's handles, with these global ranks; raises as
`weft.init`.
"""


def renew(
    membership: Membership,
    joiners: int,
    timeout: float,
    device: str,
    make: Make[World],
    adopt: Callable[[Membership], object],
    left: Collection[int],
) -> tuple[World, list[LateResponder]]:
    """The successor of the world of `membership`, with this number of `joiners`, and the endpoints
    that are kept for ranks that were left out. `adopt` is called with the membership in each
    decided world; `left` are ranks that have announced that they leave for good.

    Raises as `Agreement.run`, and as `make` if the same ranks fail to make their world again.
    """
    own = _endpoint(membership, joiners, device)
    try:
        decision = Agreement(View(membership, own.handle, joiners, timeout, frozenset(left))).run()
    except BaseException:
        own.close()
        raise
    kept = [LateResponder(membership.endpoint, decision)]
    return follow(decision, own, timeout, device, make, adopt, kept, membership.in_doubt)


def follow(
    decision: Decision,
    own: Endpoint,
    timeout: float,
    device: str,
    make: Make[World],
    adopt: Callable[[Membership], object],
    kept: Sequence[LateResponder] = (),
    in_doubt: bool = False,
) -> tuple[World, list[LateResponder]]:
    """As `renew`, starting from a decision in which this process has the endpoint `own`."""
    kept = [*kept]
    again = False  # whether the same ranks have failed to make their world before
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(lambda: _close(kept))
        unless_made.callback(own.close)
        while True:
            membership = Membership.decided(decision, own)
            assert membership is not None  # an agreement raises `Excluded` instead
            adopt(membership)
            try:
                made = make(Known(membership.rank, decision.handles), own, decision.global_ranks)
                break
            except (PeerLost, PeerTimeout):
                if again:
                    raise
            following = _endpoint(membership, decision.joiners, device)
            unless_made.callback(following.close)
            view = View(membership, following.handle, decision.joiners, timeout)
            decision = Agreement(view).run()
            again = decision.previous == (*range(len(membership.handles)),)
            kept.append(LateResponder(own, decision))
            own = following
        unless_made.pop_all()
    if not (decision.doubtful or in_doubt):  # then nobody else can call
        _close(kept)
        kept = []
    return made, kept


def _close(kept: Sequence[LateResponder]) -> None:
    for each in kept:
        each.close()


def join(
    handles: Sequence[Handle], starting: float, timeout: float, device: str, make: Make[World]
) -> tuple[World, Membership, list[LateResponder]]:
    """As `renew`, for a process that joins the ranks with these `handles` within `starting`
    seconds, and its place in the world.
    """
    own = Endpoint(device)
    own.open_if_possible(-1)
    try:
        decision = agreement.join(handles, own.handle, starting)
    except BaseException:
        own.close()
        raise
    places = list[Membership]()
    made, kept = follow(decision, own, timeout, device, make, places.append)
    return made, places[-1], kept


def _endpoint(membership: Membership, joiners: int, device: str) -> Endpoint:
    endpoint = Endpoint(device)
    if joiners or membership.several_hosts:
        endpoint.open_if_possible(membership.rank)
    return endpoint


def invitation(membership: Membership) -> str:
    """A text by which other processes find the ranks of a world."""
    membership.endpoint.open_if_possible(membership.rank)
    handles = [*membership.handles]
    handles[membership.rank] = membership.endpoint.handle
    return _text(handles)


def invited(text: str) -> list[Handle]:
    """The handles in an invitation. Raises `ValueError` for any other text."""
    return _value(text, list[Handle], "invitation must be what world.invitation() returned")


def handle_of(endpoint: Endpoint) -> str:
    """The handle of an endpoint, which is opened to other hosts if possible, as a text."""
    endpoint.open_if_possible(-1)
    return _text(endpoint.handle)


def handle_in(text: str) -> Handle:
    """The handle in a text. Raises `ValueError` for any other text."""
    return _value(text, Handle, "a handle must be what handle_of(endpoint) returned")


def _text(value: object) -> str:
    return base64.urlsafe_b64encode(zlib.compress(encode(value))).decode()


def _value(text: str, kind: type[Kind], what: str) -> Kind:
    try:
        return decode(_decompressed(base64.urlsafe_b64decode(text)), kind)
    except (ValueError, TypeError, zlib.error) as error:
        raise ValueError(f"{what}; got {text!r:.60}") from error


def _decompressed(data: bytes) -> bytes:
    """The decompressed text, of a bounded size. Raises `ValueError` for more."""
    expanded = zlib.decompressobj().decompress(data, _LONGEST + 1)
    if len(expanded) > _LONGEST:
        raise ValueError(f"it expands to more than {_LONGEST >> 20} MiB")
    return expanded
