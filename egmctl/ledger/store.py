"""The ledger of one pool: what exists on this host because of it, written before and after each stage.

Every transaction is durable when it returns (rollback journal, ``synchronous=EXTRA``: the journal's removal is synced
too), so that what the ledger lists is always a superset of what exists. One process writes, under `OwnerLock`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from egmctl.errors import CleanupPendingError, PreflightError
from egmctl.ledger.records import ChunkRow, Event, PoolRecord, Resource, SegmentId, SegmentRow
from egmctl.steps import step

__all__ = ["SCHEMA_VERSION", "Ledger", "LedgerUnreadable", "LedgerWriteError", "read_events", "read_only"]

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x65676D31  # "egm1"

LOCK_SECONDS = 5.0
"""How long a reader waits for a commit: on a disk that syncs slowly it is not short."""

_SCHEMA = """
CREATE TABLE pool (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    name TEXT NOT NULL, state TEXT NOT NULL, goal TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    plan TEXT NOT NULL, nonce TEXT NOT NULL, client TEXT NOT NULL,
    agent_pid INTEGER NOT NULL, agent_started INTEGER NOT NULL, boot_id TEXT NOT NULL,
    endpoint TEXT NOT NULL DEFAULT '', socket TEXT NOT NULL DEFAULT '', master TEXT NOT NULL DEFAULT '',
    exclusive INTEGER NOT NULL DEFAULT 0, updated REAL NOT NULL
) STRICT;
CREATE TABLE chunk (
    idx INTEGER PRIMARY KEY, numa_node INTEGER NOT NULL, nbytes INTEGER NOT NULL, address INTEGER, state TEXT NOT NULL
) STRICT;
CREATE TABLE segment (
    id TEXT PRIMARY KEY, chunk INTEGER NOT NULL, master TEXT NOT NULL, client TEXT NOT NULL, name TEXT NOT NULL,
    endpoint TEXT NOT NULL, base INTEGER NOT NULL, size INTEGER NOT NULL, protocol TEXT NOT NULL,
    state TEXT NOT NULL, since REAL NOT NULL
) STRICT;
CREATE TABLE resource (
    kind TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (kind, name)
) STRICT;
CREATE TABLE event (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, who TEXT NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL
) STRICT;
"""

_POOL_COLUMNS = frozenset(
    {"state", "goal", "reason", "nonce", "client", "agent_pid", "agent_started", "boot_id"}
    | {"endpoint", "socket", "master", "exclusive"}
)
_RECORD_COLUMNS = ("name", "plan", "updated", *sorted(_POOL_COLUMNS))


class LedgerUnreadable(PreflightError):
    """A ledger that this program cannot read: corrupted, or of another schema."""

    code = "ledger-unreadable"


class LedgerWriteError(CleanupPendingError):
    """A record that could not be made durable. What was about to be done was not begun; what is owned stays owned."""

    code = "ledger-write"


def _hex(pair: SegmentId) -> str:
    return f"{pair[0]:016x}-{pair[1]:016x}"


def _pair(text: str) -> SegmentId:
    first, _, second = text.partition("-")
    return int(first, 16), int(second, 16)


def _unreadable(path: Path, error: Exception) -> LedgerUnreadable:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return LedgerUnreadable(
            f"the ledger's owner has been writing it for more than {LOCK_SECONDS:g} s",
            where=str(path),
            hint="try again; if it stays so, see whether the disk under it answers (dmesg)",
        )
    return LedgerUnreadable(
        f"the ledger cannot be read: {error}",
        where=str(path),
        hint="restore it from a copy, or move it away once no agent of this pool runs and the Master lists none of its "
        "segments; nothing in it is known to egmctl until then",
    )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    from urllib.parse import quote

    return sqlite3.connect(
        f"file:{quote(os.fspath(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=LOCK_SECONDS,
    )


def _check_schema(db: sqlite3.Connection, path: Path) -> bool:
    """Whether it holds a pool; False for a file whose creation was cut short before its first commit."""
    try:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        tables = int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if version == 0 and tables == 0:
            return False
        if int(db.execute("PRAGMA application_id").fetchone()[0]) != _APPLICATION_ID:
            raise LedgerUnreadable(
                "is a database of another program", where=str(path), hint="move it away, or give another --state-dir"
            )
        if version != SCHEMA_VERSION:
            other = "newer" if version > SCHEMA_VERSION else "older"
            raise LedgerUnreadable(
                f"the ledger has schema {version}, this egmctl knows {SCHEMA_VERSION}",
                where=str(path),
                hint=f"use the {other} egmctl that wrote it, at least to tear the pool down",
                facts={"schema": version, "known": SCHEMA_VERSION},
            )
        return int(db.execute("SELECT count(*) FROM pool").fetchone()[0]) == 1
    except (sqlite3.DatabaseError, UnicodeError) as error:  # damage can be in the text of sqlite's own message
        raise _unreadable(path, error) from error


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("a value that should be an object is none")
    return found


def _record(db: sqlite3.Connection) -> PoolRecord:
    pool = db.execute(f"SELECT {', '.join(_RECORD_COLUMNS)} FROM pool").fetchone()  # noqa: S608 - known columns
    # Read to the end at once: a cursor left open by an error in what follows would keep others from writing.
    chunks = db.execute("SELECT idx, numa_node, nbytes, address, state FROM chunk ORDER BY idx").fetchall()
    segments = db.execute(
        "SELECT id, chunk, master, client, name, endpoint, base, size, protocol, state, since FROM segment "
        "ORDER BY rowid"
    ).fetchall()
    resources = db.execute("SELECT kind, name, state, detail FROM resource ORDER BY rowid").fetchall()
    columns = dict(zip(_RECORD_COLUMNS, pool, strict=True))
    columns |= {
        "plan": _object(columns["plan"]),
        "client": _pair(columns["client"]),
        "exclusive": bool(columns["exclusive"]),
    }
    return PoolRecord(
        **columns,
        chunks=tuple(ChunkRow(*row) for row in chunks),
        segments=tuple(SegmentRow(_pair(row[0]), row[1], row[2], _pair(row[3]), *row[4:]) for row in segments),
        resources=tuple(Resource(kind, name, state, _object(detail)) for kind, name, state, detail in resources),
    )


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection | None]:
    """A connection that only reads. A journal left by a killed writer needs a writable one to be rolled back."""
    if not path.exists():
        yield None
        return
    for mode in ("ro", "rw"):
        db = None
        try:
            db = _connect(path, mode)
            db.execute("BEGIN")
            if not _check_schema(db, path):
                yield None
                return
        except LedgerUnreadable as error:
            if mode == "ro" and isinstance(error.__cause__, sqlite3.OperationalError):
                continue
            raise
        except sqlite3.Error as error:
            if mode == "ro" and isinstance(error, sqlite3.OperationalError):
                continue
            raise _unreadable(path, error) from error
        else:
            try:
                yield db
            except (sqlite3.Error, ValueError, TypeError) as error:
                raise _unreadable(path, error) from error
            return
        finally:
            if db is not None:
                db.close()


def read_only(path: Path) -> PoolRecord | None:
    """What a ledger holds, without owning it; None when there is none. Raises `LedgerUnreadable`."""
    with _reading(path) as db:
        return None if db is None else _record(db)


def read_events(path: Path, limit: int = 1000) -> list[Event]:
    """The last ``limit`` events, oldest first."""
    with _reading(path) as db:
        if db is None:
            return []
        rows = db.execute("SELECT at, who, what, detail FROM event ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
        return [Event(at, who, what, json.loads(detail)) for at, who, what, detail in reversed(rows)]


class Ledger:
    """The writable ledger. The caller holds the pool's `OwnerLock`. Safe to use from several threads."""

    def __init__(self, path: Path, db: sqlite3.Connection, who: str) -> None:
        self.path = path
        self.who = who
        self._db = db
        self._mutex = threading.RLock()
        self._known: PoolRecord | None = None

    @classmethod
    def open(cls, path: Path, *, who: str) -> Ledger:
        """An existing ledger. Raises `LedgerUnreadable`, and `PreflightError` when it cannot be written."""
        return cls(path, cls._writable(path, must_hold_pool=True), who)

    @classmethod
    def create(
        cls, path: Path, *, who: str, name: str, plan: dict[str, Any], chunks: Iterable[ChunkRow], **pool: Any
    ) -> Ledger:
        """A ledger for a new pool, or a new life of a pool that is gone: its rows start anew, its events stay.

        ``pool`` are further columns (nonce, client, agent_pid, ...). Raises `PreflightError` when nothing can be
        written here, which is the time to find out: nothing is owned yet.
        """
        try:
            with step("ledger.create", path=str(path)):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.fchmod(fd, 0o600)
                finally:
                    os.close(fd)
        except OSError as error:
            raise _unwritable(path, error) from error
        db = cls._writable(path, must_hold_pool=False)
        ledger = cls(path, db, who)
        try:
            with ledger.record("provision begins"):
                if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                for table in ("pool", "chunk", "segment", "resource"):
                    db.execute(f"DELETE FROM {table}")  # noqa: S608 - names from the line above
                db.execute(
                    "INSERT INTO pool (one, name, state, goal, plan, nonce, client, agent_pid, agent_started, boot_id, "
                    "updated) VALUES (1, ?, 'provisioning', 'provisioned', ?, '', ?, 0, 0, '', 0)",
                    (name, json.dumps(plan), _hex((0, 0))),
                )
                db.executemany(
                    "INSERT INTO chunk VALUES (?, ?, ?, ?, ?)",
                    [(c.index, c.numa_node, c.nbytes, c.address, c.state) for c in chunks],
                )
                ledger.set_pool(**pool)
        except LedgerWriteError as error:
            # A commit that reports failure may be on disk all the same; nothing is owned, so say that as well.
            with suppress(LedgerWriteError), ledger.record("provision did not begin") as undone:
                undone.set_pool(state="gone", goal="gone")
            ledger.close()
            raise _unwritable(path, error) from error
        except BaseException:
            ledger.close()
            raise
        return ledger

    @staticmethod
    def _writable(path: Path, *, must_hold_pool: bool) -> sqlite3.Connection:
        db = None
        try:
            with step("ledger.open", path=str(path)):
                db = _connect(path, "rw")
                if not _check_schema(db, path) and must_hold_pool:
                    raise LedgerUnreadable("holds no pool", where=str(path), hint="remove it")
                db.execute("PRAGMA journal_mode = DELETE")
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("BEGIN IMMEDIATE")
                db.execute("ROLLBACK")
        except BaseException as error:
            if db is not None:
                db.close()
            if isinstance(error, sqlite3.Error):
                raise _unwritable(path, error) from error
            raise
        return db

    def close(self) -> None:
        with self._mutex, suppress(sqlite3.Error):
            self._db.close()

    @contextmanager
    def record(self, what: str, **detail: Any) -> Iterator[Ledger]:
        """One transaction: the changes made inside and the event, durable together when this returns.

        Raises `LedgerWriteError` when it cannot be made durable. ``detail`` is for people: never a handle.
        """
        with self._mutex:
            self._known = None
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self
                now = time.time()
                self._db.execute(
                    "INSERT INTO event (at, who, what, detail) VALUES (?, ?, ?, ?)",
                    (now, self.who, what, json.dumps(detail)),
                )
                self._db.execute("UPDATE pool SET updated = ?", (now,))
                with step("ledger.commit", what=what):
                    self._db.execute("COMMIT")
            except (sqlite3.Error, OSError) as error:
                self._roll_back()
                raise LedgerWriteError(
                    f'the ledger could not record "{what}": {error}',
                    where=str(self.path),
                    hint="make room on its file system or make it writable, then run teardown",
                ) from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    # Changes; each belongs inside `record`.

    def set_pool(self, **columns: Any) -> None:
        for column, value in columns.items():
            if column not in _POOL_COLUMNS:
                raise ValueError(column)
            if isinstance(value, tuple):
                value = _hex(value)
            self._db.execute(f"UPDATE pool SET {column} = ?", (value,))  # noqa: S608 - a known column

    def set_chunks(self, state: str, indices: Iterable[int], addresses: dict[int, int] | None = None) -> None:
        places = addresses or {}
        self._db.executemany(
            "UPDATE chunk SET state = ?, address = coalesce(?, address) WHERE idx = ?",
            [(state, places.get(index), index) for index in indices],
        )

    def add_segments(self, rows: Iterable[SegmentRow]) -> None:
        now = time.time()
        self._db.executemany(
            f"INSERT INTO segment VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'mounting', {now!r})",  # noqa: S608 - a number
            [
                (_hex(r.id), r.chunk, r.master, _hex(r.client), r.name, r.endpoint, r.base, r.size, r.protocol)
                for r in rows
            ],
        )

    def set_segments(self, state: str, ids: Iterable[SegmentId]) -> None:
        now = time.time()
        self._db.executemany(
            "UPDATE segment SET state = ?, since = ? WHERE id = ?", [(state, now, _hex(i)) for i in ids]
        )

    def put_resource(self, kind: str, name: str, state: str, **detail: Any) -> None:
        """Insert or change; ``detail`` given replaces, none given keeps."""
        self._db.execute(
            "INSERT INTO resource VALUES (?, ?, ?, ?) ON CONFLICT (kind, name) DO UPDATE SET state = excluded.state, "
            "detail = CASE excluded.detail WHEN '{}' THEN detail ELSE excluded.detail END",
            (kind, name, state, json.dumps(detail)),
        )

    # Reading.

    def pool(self) -> PoolRecord:
        with self._mutex:
            try:
                # Nobody else writes, so what was read last holds until the next change of our own.
                if self._db.in_transaction:
                    return _record(self._db)
                if self._known is None:
                    self._known = _record(self._db)
                return self._known
            except (sqlite3.Error, ValueError, TypeError) as error:
                raise _unreadable(self.path, error) from error


def _unwritable(path: Path, error: Exception) -> PreflightError:
    reason = error.strerror if isinstance(error, OSError) else error
    return PreflightError(
        f"the ledger cannot be written: {reason}",
        where=str(path),
        hint="make its folder writable and see that the file system has room, or give another with --state-dir",
    )
