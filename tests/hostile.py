"""Programs that must fail, whatever they try; `double` is what their tests ask for."""

from __future__ import annotations

HOSTILE = {
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef double(x): os._exit(0)",
    "leaves at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 0",
    "raises SystemExit": "def double(x): raise SystemExit(0)",
    "forks and leaves": "import os\nif os.fork(): os._exit(0)\ndef double(x): return 0",
    "equals everything": "class E:\n def __eq__(s, o): return True\ndef double(x): return E()",
    "an int that equals everything": "class E(int):\n def __eq__(s, o): return True\ndef double(x): return E(1)",
    "a str in place of an int": "def double(x): return str(2 * x)",
    "an endless generator": "def double(x):\n while True: yield 1",
    "patches builtins": "import builtins\nbuiltins.print = builtins.abs = lambda *a: 0\ndef double(x): return 0",
    "patches json": 'import json\njson.dumps = lambda *a, **k: \'["passed", 3, ""]\'\ndef double(x): return 0',
    "patches our codec": """
        import sys
        for module in list(sys.modules.values()):
            if hasattr(module, "encode") and hasattr(module, "decode"):
                module.encode = lambda value: b'["passed", 3, ""]'
        def double(x): return 0
        """,
    "writes a report to every descriptor": """
        import os
        for fd in range(200):
            try: os.write(fd, (17).to_bytes(4, "big") + b'["passed", 3, ""]')
            except OSError: pass
        def double(x): return 0
        """,
    "prints a verdict": "print('ALL TESTS PASSED')\nprint('[\"passed\", 3, \"\"]')\ndef double(x): return 0",
    "an error whose text ends the process": """
        import os
        class E(AssertionError):
            def __str__(self): os._exit(0)
            __repr__ = __str__
        def double(x): raise E()
        """,
    "a name of a megabyte": "def double(x): raise type('E' * (1 << 20), (Exception,), {})('m' * (1 << 24))",
    "a value of a hundred megabytes": "def double(x): return 'x' * (100 << 20)",
    "a list in itself": "def double(x):\n a = []\n a.append(a)\n return a",
    "nested a million deep": "def double(x):\n a = []\n for _ in range(10**6): a = [a]\n return a",
    "an integer of four million digits": "def double(x): return 1 << (4 << 23)",
    "spins": "def double(x):\n while True: pass",
    "spins while loading": "while True: pass",
    "sleeps": "import time\ndef double(x): time.sleep(10**6)",
    "ignores every signal": """
        import signal
        for s in range(1, 60):
            try: signal.signal(s, signal.SIG_IGN)
            except (OSError, ValueError): pass
        def double(x):
            while True: pass
        """,
    "one long call in C": "def double(x): return len(str(7 ** 7 ** 9))",
    "a fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "a thread bomb": """
        import threading, time
        def double(x):
            while True:
                try: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
                except RuntimeError: pass
        """,
    "kills all it can": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef double(x): return 0",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)\ndef double(x): return 0",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef double(x): return 0",
    "takes all memory": "def double(x):\n a = []\n while True: a.append(bytearray(1 << 26))",
    "takes memory in many processes": """
        import os
        def double(x):
            for _ in range(40):
                if os.fork() == 0: break
            a = []
            while True: a.append(bytearray(b"x" * (1 << 22)))
        """,
    "floods stdout and stderr": "import os\nwhile True:\n os.write(1, b'x' * 65536)\n os.write(2, b'x' * 65536)",
    "fills the disk": "def double(x):\n with open('big', 'wb') as f:\n  while True: f.write(b'x' * (1 << 20))",
    "makes files without end": "def double(x):\n i = 0\n while True:\n  open(f'f{i}', 'w').close()\n  i += 1",
    "locks its folder": "import os\nopen('x', 'w').close()\nos.chmod('.', 0)\ndef double(x): return 0",
    "overflows the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef double(x): return double(x + 1)",
    "crashes": "import ctypes\ndef double(x): ctypes.string_at(0)",
    "reads the users": "def double(x): return open('/etc/passwd').read()",
    "reads other processes": "import os\ndef double(x): return open(f'/proc/{os.getppid()}/environ').read()",
    "traces its parent": "import ctypes, os\ndef double(x): return ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)",
    "mounts": "import ctypes\ndef double(x): return ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "wants namespaces": "import ctypes\ndef double(x): return ctypes.CDLL(None).unshare(0x10020000)",
    "becomes root": "import os\ndef double(x): os.setuid(0)",
    "starts a shell": "import subprocess\ndef double(x): return int(subprocess.check_output(['sh', '-c', 'echo 4']))",
    "a NUL in the source": "def double(x): return 0\n\0",
    "a lone surrogate in the source": "x = '\ud800'\ndef double(x): return 0",
    "a megabyte of brackets": "(" * (1 << 20),
    "five megabytes": "x = 1\n" * (5 << 18) + "def double(x): return 0",
    "no such function": "def triple(x): return 0",
    "no Python": "I am sorry, I cannot do that.",
    "nothing": "",
}
