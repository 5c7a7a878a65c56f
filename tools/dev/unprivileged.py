"""Run as a script: `unprivileged.py FOLDERS PROGRAM ARGUMENT…` becomes PROGRAM, under a name that PostgreSQL accepts.

It refuses to run as root, and as a user id without a name, both common in containers. Best is a user namespace in which
our own id is called `nobody`: PostgreSQL is content, while outside of it all still belongs to us. So no user is added
and no permission changes, even in root's home. Where a container forbids that, root becomes the real `nobody`, who gets
FOLDERS (joined by ":") and must be able to reach them.
Standard library only: it is run with `python -I -S`.
"""

import ctypes
import os
import pwd
import sys
from pathlib import Path

NEW_USER_NAMESPACE = 0x10000000  # CLONE_NEWUSER; Python has os.unshare only since 3.12
UNREACHABLE = 78


def become_nobody(folders: list[Path], program: str) -> None:
    nobody = pwd.getpwnam("nobody")
    if _own_namespace(nobody.pw_uid, nobody.pw_gid) or os.geteuid() != 0:
        return
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
    for path in (*folders, Path(program)):
        if not os.access(path, os.X_OK):
            sys.stderr.write(f"PostgreSQL can't run as root, and the user nobody can't reach {path}\n")
            sys.exit(UNREACHABLE)


def _own_namespace(uid: int, gid: int) -> bool:
    our_uid, our_gid = os.geteuid(), os.getegid()  # inside, before the maps are written, these would be unknown
    unshare = getattr(ctypes.CDLL(None), "unshare", None)  # Linux only
    if unshare is None or unshare(NEW_USER_NAMESPACE) != 0:
        return False
    Path("/proc/self/uid_map").write_text(f"{uid} {our_uid} 1\n")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{gid} {our_gid} 1\n")
    return True


if __name__ == "__main__":
    become_nobody([Path(folder) for folder in sys.argv[1].split(":")], sys.argv[2])
    os.execv(sys.argv[2], sys.argv[2:])
