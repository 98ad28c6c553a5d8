#!/usr/bin/env python3
"""Serves a folder on 127.0.0.1, opens it in headless Chromium and waits for the page's verdict.

The page POSTs {"level", "text"} to /log for each console line, and {"ok", "text"} to /result once
it is done. Exit code 0: the first result was ok. 1: it was not, or there was none in time, or the
browser ended by itself. The browser never outlives this program.
"""

import argparse
import functools
import glob
import http.server
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

FLAGS = [
    "--headless",
    # Chromium refuses to run as root with its sandbox. The only page it opens is our own.
    "--no-sandbox",
    # A container's /dev/shm is often too small for it.
    "--disable-dev-shm-usage",
    # WebGPU on a machine without a GPU: the first is what it takes, the others say which adapter.
    "--enable-unsafe-webgpu",
    "--enable-unsafe-swiftshader",
    "--use-webgpu-adapter=swiftshader",
    # No traffic of the browser's own.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    # The browser's own messages, console included; shown when the page says nothing.
    "--enable-logging=stderr",
]
POLL_S = 0.2
LOG_LINES = 40


class Handler(http.server.SimpleHTTPRequestHandler):
    # The system's table of types may differ, and a module of another type is not run.
    extensions_map = {
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".html": "text/html",
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, *args, verdicts, **kwargs):
        self.verdicts = verdicts
        super().__init__(*args, **kwargs)

    def do_GET(self):
        if self.path == "/favicon.ico":
            self.answer(204)
        else:
            super().do_GET()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            message = json.loads(body)
            text = str(message["text"])
            if self.path == "/log":
                print(f"console.{message['level']}: {text}", file=sys.stderr, flush=True)
            elif self.path == "/result":
                self.verdicts.put((message["ok"] is True, text))
            else:
                return self.answer(404)
        except (ValueError, KeyError, TypeError):
            self.verdicts.put((False, f"the page sent {self.path} what is no message: {body[:200]!r}"))
        self.answer(204)

    def answer(self, code):
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def end_headers(self):
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format, *args):
        pass  # Requests are of no interest, and a missing file is an error on the page.


def gpu_memory(group):
    """What the GPU process of the browser holds, in MB; 0 where there is none, or no /proc."""
    most = 0
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{folder}/cmdline", "rb") as file:
                if b"--type=gpu-process" not in file.read():
                    continue
            if os.getpgid(int(os.path.basename(folder))) != group:
                continue
            with open(f"{folder}/statm") as file:
                most = max(most, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
        except (OSError, ValueError):
            pass  # It has just ended.
    return most


def wait(verdicts, browser, timeout, limit, peak):
    """The first verdict, or one that says why there is none; and whether it is the page's own. peak[0] becomes the most
    that the GPU process held."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            return *verdicts.get(timeout=POLL_S), True
        except queue.Empty:
            if browser.poll() is not None:
                return False, f"the browser ended by itself, exit code {browser.returncode}", False
        peak[0] = max(peak[0], gpu_memory(browser.pid))
        if limit and peak[0] > limit:
            return False, f"the browser's GPU process holds {peak[0]:.0f} MB, at most {limit:g} are allowed", True
    return False, f"no result within {timeout:g} s", False


def stop(browser):
    """Kills the browser with its helpers: it leads a process group of its own."""
    try:
        os.killpg(browser.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    browser.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--page", default="index.html")
    parser.add_argument("--query", default="", help="of the page's address, without the '?'")
    parser.add_argument("--gpu-memory", type=float, metavar="MB", help="more than this of the browser's GPU process is a failure")
    args = parser.parse_args()

    # A signal ends the program by an exception, so that the browser is stopped on that way too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))

    verdicts = queue.Queue()
    handler = functools.partial(Handler, directory=args.folder, verdicts=verdicts)
    started = time.monotonic()
    # Port 0: any free one, so that runs side by side do not meet.
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        # A killed browser's helpers may still be writing here for a moment.
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        tempfile.TemporaryFile("w+", errors="replace") as log,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{args.page}?{args.query}"
        browser = subprocess.Popen(
            [args.browser, *FLAGS, f"--user-data-dir={profile}", address],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # What it leaves in the folder for temporary files goes with the profile.
            env={**os.environ, "TMPDIR": profile},
            start_new_session=True,
        )
        try:
            peak = [0.0]
            ok, text, from_page = wait(verdicts, browser, args.timeout, args.gpu_memory, peak)
        finally:
            stop(browser)
            server.shutdown()
        if not from_page:
            # The page has sent its own console already. Without a message bus, as in most
            # containers, the browser complains of that dozens of times.
            log.seek(0)
            lines = [line.rstrip() for line in log if "dbus/" not in line]
            for line in lines[-LOG_LINES:]:
                print(f"browser: {line}", file=sys.stderr)
    print(text)
    memory = f", its GPU process held {peak[0]:.0f} MB at most" if peak[0] else ""
    print(f"browser: {'passed' if ok else 'FAILED'} in {time.monotonic() - started:.1f} s{memory}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
