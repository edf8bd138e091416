"""Programs that end, raise, fork and look at themselves in every way that we could think of, by name."""

from __future__ import annotations

ENDINGS = {
    "falls off the end": "print('out'); import sys; print('err', file=sys.stderr)",
    "sys.exit of a number": "import sys; sys.exit(3)",
    "sys.exit of a large number": "import sys; sys.exit(256 + 7)",
    "sys.exit of a text": "import sys; sys.exit('a text')",
    "sys.exit of nothing": "import sys; sys.exit()",
    "sys.exit in atexit": "import atexit, sys; atexit.register(sys.exit, 9); print('x')",
    "exit of site": "exit(4)",
    "os._exit": "import os; print('x'); os._exit(5)",
    "os.abort": "import os; os.abort()",
    "segmentation fault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('alive')",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')",
    "SIGHUP": "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print('alive')",
    "SIGPIPE": "import os, signal; os.kill(os.getpid(), signal.SIGPIPE); print('alive')",
    "SIGCHLD": "import os, signal; os.kill(os.getpid(), signal.SIGCHLD); print('alive')",
    "SIGTERM handled": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(11))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('alive')"
    ),
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "fault with faulthandler": (
        "import faulthandler, os, signal\nfaulthandler.enable()\ndef f(): os.kill(os.getpid(), signal.SIGABRT)\nf()"
    ),
}

EXCEPTIONS = {
    "an exception": "def f(x):\n    return 1 / x\n\ndef g():\n    f(0)\n\ng()",
    "a chain": (
        "try:\n    {}['key']\nexcept KeyError as error:\n    try:\n        raise ValueError('mine') from error\n"
        "    except ValueError:\n        raise RuntimeError('while handling')"
    ),
    "from None": "try:\n    1/0\nexcept ZeroDivisionError:\n    raise ValueError('x') from None",
    "a syntax error": "x = = 1",
    "an indentation error": "if True:\nx = 1",
    "a syntax error in an import": "import broken",
    "an error in an import": "import raises",
    "a missing import": "import no_such_module_at_all",
    "recursion": "def f(): f()\nf()",
    "an exception of its own": "class Mine(Exception):\n    pass\nraise Mine('a', 2)",
    "an unprintable exception": "class Mine(Exception):\n    def __str__(self): raise ValueError\nraise Mine",
    "a message of several lines": "raise ValueError('one\\ntwo\\n\\nthree')",
    "a long message": "raise ValueError('x' * 300_000)",
    "odd characters": "raise ValueError('\\ud800 \\x00 \\U0001f600 \\x1b[31m')",
    "assert": "assert 1 == 2, 'told'",
    "in a thread": "import threading\nt = threading.Thread(target=lambda: 1/0, name='T')\nt.start(); t.join()",
    "in a finalizer": "class A:\n    def __del__(self): 1/0\nA()\nprint('on')",
    "in atexit": "import atexit\natexit.register(lambda: 1/0)",
    "in a child by fork": "import os\nif os.fork() == 0: raise ValueError('child')\nprint(os.wait()[1])",
    "another excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[:2])\n1/0",
    "a broken excepthook": "import sys\ndef hook(*a): raise ValueError('in hook')\nsys.excepthook = hook\n1/0",
    "no excepthook": "import sys\ndel sys.excepthook\n1/0",
    "exit in excepthook": "import sys\nsys.excepthook = lambda *a: sys.exit(12)\n1/0",
    "tracebacklimit": "import sys\nsys.tracebacklimit = 1\ndef f(): 1/0\ndef g(): f()\ng()",
    "in exec": "exec('1/0')",
    "a generator": "def g():\n    yield 1\n    raise ValueError('x')\nlist(g())",
    "asyncio": "import asyncio\nasync def main(): raise ValueError('x')\nasyncio.run(main())",
    "a warning": "import warnings\ndef f(): warnings.warn('mind', stacklevel=2)\nf()",
    "a deprecation in main": "import warnings\nwarnings.warn('old', DeprecationWarning)",
    "unraisable": (
        "import sys\nsys.unraisablehook = lambda u: print(u.exc_type)\nclass A:\n    def __del__(self): 1/0\nA()"
    ),
}

ORDER = {
    "atexit order": "import atexit\nfor i in range(3): atexit.register(print, i)\nprint('main')",
    "threads at exit": (
        "import atexit, threading\natexit.register(print, 'atexit')\ndone = threading.Event()\n"
        "def late(): done.wait(); print('thread')\n"
        "threading.Thread(target=late).start()\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print('main'); done.set()"
    ),
    "module teardown": "class A:\n    def __del__(self): print('del', __name__)\na = A()\nprint('main')",
    "stdout and stderr interleaved": (
        "import sys, os\nfor i in range(5):\n    print(i)\n    print(i, file=sys.stderr)\n    os.write(1, b'raw\\n')\n"
        "    sys.stdout.buffer.write(b'buffer\\n')"
    ),
    "print without newline": "print('a', end='')\nimport os; os._exit(0)",
    "module teardown of an open file": (
        "import os\nfile = os.fdopen(os.dup(1), 'w')\nfile.write('held back')\ndef f(): return file\nclass A: f = f"
    ),
    "module teardown of an imported module": "import keeps\nprint('main')",
    "monkeypatched standard module": "import json\nclass A:\n    def __del__(self): print('del')\njson.mine = A()",
    "closed stdout": "import sys\nsys.stdout.close()",
    "closed descriptor 1": "import os\nos.close(1)\nos.write(2, b'here')",
    "print to closed stdout": "import sys\nsys.stdout.close()\nprint('x')",
    "no stdout": "import sys\nsys.stdout = None\nprint('x')",
    "descriptors closed like a daemon": "import os\nos.closerange(3, 4096)\nprint(os.open('/dev/null', 0))\n1/0",
    "lowest descriptor": "import os\nprint(os.open('/dev/null', 0), os.pipe())",
    "tell of stdout": "import sys\ntry: print(sys.stdout.tell())\nexcept OSError as error: print(error)",
    "reconfigure": "import sys\nsys.stdout.reconfigure(encoding='utf-16', newline='\\r\\n')\nprint('x')",
}

PROCESSES = {
    "spawn": (
        "import multiprocessing as mp\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with mp.get_context('spawn').Pool(2) as p: print(p.map(f, range(5)))"
    ),
    "fork": (
        "import multiprocessing as mp\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with mp.get_context('fork').Pool(2) as p: print(p.map(f, range(5)))"
    ),
    "forkserver": (
        "import multiprocessing as mp\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with mp.get_context('forkserver').Pool(2) as p: print(p.map(f, range(5)))"
    ),
    "what a spawned process sees": (
        "import multiprocessing as mp, os, sys\n"
        "def f():\n    print(__name__, __spec__, __file__, sys.argv, sys.path)\n"
        "    print(os.environ.get('PYTHONPATH'), mp.parent_process().name)\n"
        "if __name__ == '__main__':\n    p = mp.get_context('spawn').Process(target=f, name='P'); p.start(); p.join()\n"
        "    print(p.exitcode)"
    ),
    "exception in a spawned process": (
        "import multiprocessing as mp\ndef f(): 1/0\n"
        "if __name__ == '__main__':\n    p = mp.get_context('spawn').Process(target=f, name='P'); p.start(); p.join()\n"
        "    print(p.exitcode)"
    ),
    "spawn without a guard": (
        "import multiprocessing as mp\nmp.set_start_method('spawn')\np = mp.Process(target=print, args=('x',))\n"
        "try: p.start(); p.join(); print(p.exitcode)\nexcept RuntimeError as error: print(type(error))"
    ),
    "manager and shared memory": (
        "import multiprocessing as mp\nfrom multiprocessing import shared_memory\n"
        "if __name__ == '__main__':\n    with mp.Manager() as m:\n        d = m.dict(a=1); print(dict(d))\n"
        "    s = shared_memory.SharedMemory(create=True, size=10); print(s.size >= 10); s.close(); s.unlink()"
    ),
    "executor": (
        "from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
        "if __name__ == '__main__':\n    with ProcessPoolExecutor(2) as p, ThreadPoolExecutor(2) as t:\n"
        "        print(list(p.map(abs, [-1])), list(t.map(abs, [-2])))"
    ),
    "an unpicklable main": (
        "import multiprocessing as mp, threading\nf = lambda: 1\nlock = threading.Lock()\nclass A:\n    lock = lock\n"
        "def g(): print('ran', type(lock).__name__)\n"
        "if __name__ == '__main__':\n    p = mp.get_context('fork').Process(target=g); p.start(); p.join()\n"
        "    try: mp.get_context('spawn').Process(target=f).start()\n    except Exception as error: print(type(error))"
    ),
    "subprocess": (
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'import sys, os; print(sys.path, os.environ)'],"
        " capture_output=True, text=True))"
    ),
    "double fork": (
        "import os, sys\ntold, tell = os.pipe()\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        print('daemon', os.getppid() > 0); os.write(tell, b'x'); os._exit(0)\n    os._exit(0)\n"
        "os.wait(); os.read(told, 1); print('main')"
    ),
    "waiting for any child": "import os\ntry: os.wait()\nexcept ChildProcessError: print('none')",
    "exec of itself": (
        "import os, sys\nprint(sys.argv, sys.orig_argv, os.environ.get('AGAIN'))\n"
        "if not os.environ.get('AGAIN'):\n    os.environ['AGAIN'] = '1'\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv, 'again'])"
    ),
    "SIGTERM ignored": (
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "os.system('kill -TERM $$; echo alive'); print('alive')"
    ),
    "signals in a child program": "import os\nos.system('grep 'Sig[BIC]' /proc/self/status')",
}

LOOKING = {
    "pickle of a class of main": (
        "import pickle\nclass A:\n    x = 1\nprint(pickle.dumps(A()), pickle.loads(pickle.dumps(A())).x)"
    ),
    "inspect": (
        "import inspect, sys\n"
        "def f(): return [(i.filename, i.lineno, i.function, i.code_context) for i in inspect.stack()]\n"
        "print(f(), inspect.getsource(f), inspect.getmodule(f), inspect.getfile(sys.modules['__main__']))"
    ),
    "print_stack": "import traceback\ndef f(): traceback.print_stack()\nf()",
    "dump_traceback": "import faulthandler\ndef f(): faulthandler.dump_traceback()\nf()",
    "doctest": "'''\n>>> 1 + 1\n2\n>>> 1 + 1\n3\n'''\nimport doctest\nprint(doctest.testmod())",
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\n"
        "unittest.main(testRunner=unittest.TextTestRunner(stream=open('/dev/null', 'w')))"
    ),
    "argparse": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--x')\np.parse_args()",
    "logging": (
        "import logging\n"
        "logging.basicConfig(format='%(filename)s:%(lineno)d %(funcName)s %(processName)s %(message)s')\n"
        "def f(): logging.warning('x')\nf()"
    ),
    "runpy": "import runpy\nprint(sorted(runpy.run_path('raises_not.py')))",
    "importlib.reload": "import raises_not, importlib\nprint(importlib.reload(raises_not).x)",
    "a new file is found": "import pathlib\npathlib.Path('fresh.py').write_text('x = 1')\nimport fresh; print(fresh.x)",
    "chdir": "import os, sys\nos.chdir('/')\nimport raises_not\nprint(sys.path[0], os.getcwd(), __file__)",
    "recursion depth": ("def f(n):\n    try: return f(n + 1)\n    except RecursionError: return n\nprint(f(0))"),
    "its own modules": (
        "import agent, launcher.x, parallel.y, worker.z\nprint(agent.WHO, launcher.x.WHO, parallel.y.WHO, worker.z.WHO)"
    ),
    "its own dlaunch": "import dlaunch\nprint(dlaunch.WHO)",
    "modules named like those of the standard library": (
        "import profile, cmd, resource, pickletools\nprint(profile.WHO, cmd.WHO, resource.WHO, pickletools.WHO)"
    ),
    "a hidden module is where it was": "import json, socket, threading\nprint(json.__file__, socket.__file__)",
    "main is main": "import __main__, sys\nprint(__main__ is sys.modules['__main__'], __main__.__file__)",
    "gc": "import gc\nprint(gc.collect() >= 0, gc.garbage)",
    "signal.set_wakeup_fd": "import signal\nprint(signal.set_wakeup_fd(-1))",
    "time zone": "import time\nprint(time.tzname, time.localtime(0))",
}

DIALOGUES = {
    "readline and read": ("import sys\nprint(repr(sys.stdin.readline()), repr(sys.stdin.read()))", "a\nb\nc"),
    "input": ("print(input('? '))", "an answer\n"),
    "input without an answer": ("print(input('? '))", ""),
    "a child reads": ("import os\nos.system('cat')", "for the child"),
    "pdb": (
        "import pdb\ndef f(x):\n    y = x + 1\n    return y\npdb.set_trace()\nprint(f(1))\nf(2)\n",
        "n\nn\ns\nw\np x\nu\nl\nq\n",
    ),
}
