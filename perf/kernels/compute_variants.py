#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The forms that compute kernels have beside the product's (LK_COMPUTE_VARIANTS), side by side in one run, and others beside
torch: time, bytes that must move per second, their share of what a copy moves in the same round, and one of the same size.

usage: perf/kernels/compute_variants.py [--library FILE] [--only LIST] [--shapes LIST] [--rounds N] [--limit SECONDS] [--quiet SECONDS]
       [--json FILE] [--small]

LIST: operations by how their names begin, and shapes as they are printed: --only "layer norm" --shapes "4096 x 8192,65536 x 1024".

The library is libloongkernels-forms.so, built when asked for by name: ninja kernels/libloongkernels-forms.so. What is worth
most comes first. Every form's results are checked before it is timed; one that is wrong is timed too, and named. A process
of its own does the work: if it says nothing for --quiet seconds or dies, the form that was in hand is named and left out,
and another process goes on behind it. The last lines name the best form of each case. --small: small shapes and any
library, to try the program out. Ends with 77 where torch or the GPU is missing, 1 if a form is wrong or did not end."""
import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PRODUCT = "as the product"


# ---- the process that measures ----


def say(**record):
    print(json.dumps(record), flush=True)


def load_forms(lib, family):
    """Names of a family's forms, and the function that sets one (-1: the product's)."""
    import ctypes
    choose = getattr(lib, "lk_variants_%s" % family, None)
    if choose is None:
        return [], lambda form: None
    choose.restype = ctypes.c_char_p
    names = []
    while True:
        name = choose(len(names))
        if name is None:
            break
        names.append(name.decode())
    choose(-1)
    return names, choose


def list_cases(c, b):
    """Family (None: the product's kernel alone) and case, what is worth most first; outputs are to be written by every
    form."""
    forward, backward = ("y", "sum", "rstd"), ("dx", "dgamma", "dbeta")
    rms, layer = c.lk.RMS, c.lk.LAYER
    norm_forward = lambda *shape, **more: ("norm_forward", forward, lambda: c.NormForward(b, *shape, **more))
    norm_backward = lambda *shape, **more: ("norm_backward", backward, lambda: c.NormBackward(b, *shape, **more))
    combine = lambda *shape: ("moe_combine", ("out",), lambda: c.Moe(b, "moe combine", *shape))
    permute = lambda *shape, **more: (None, ("permuted",), lambda: c.Moe(b, "moe permute", *shape, **more))
    both, large = (rms, layer), ((16384, 4096), (65536, 1024), (4096, 8192), (32768, 2048))
    for rows, columns in large:
        for kind in both:
            yield norm_backward(kind, rows, columns)
            yield norm_forward(kind, rows, columns)
    for columns in (2048, 4096, 5120):
        for kind in both:
            yield norm_backward(kind, 8192, columns)
            yield norm_forward(kind, 8192, columns)
    for rows, columns in ((2048, 1024), (512, 2048), (512, 4096)):  # few rows
        for kind in both:
            yield norm_forward(kind, rows, columns)
            yield norm_backward(kind, rows, columns)
    for rows, columns in large:
        yield norm_forward(layer, rows, columns, statistics_only=True)
        yield norm_forward(layer, rows, columns, residual=True)
        for kind in both:
            yield norm_backward(kind, rows, columns, residual=True)
    for columns in (256, 512):
        for kind in both:
            yield norm_backward(kind, 131072, columns)
    yield norm_forward(rms, 32768, 2048, residual=True)
    yield norm_forward(rms, 16384, 4096, residual=True)
    yield permute(8192, 2048, 8, 128)
    yield permute(16384, 4096, 2, 8)
    yield permute(8192, 2048, 8, 128, capacity=True)
    yield combine(16384, 4096, 2, 8)
    yield combine(8192, 2048, 8, 128)
    yield "adamw", (), lambda: c.Adamw(b, c.torch.float32)


class Forms:
    """A case's forms as variants of its calls."""

    def __init__(self, bench, family, outputs, case, sets):
        self.bench, self.case, self.sets, self.outputs = bench, case, sets, outputs
        self.names, self.choose = load_forms(bench.lib.lib, family)
        self.calls = [case.make(bench, s) for s in sets]

    def variant(self, form):
        def bind(call):
            def run():
                self.choose(form)
                call()
            return run
        return [bind(call) for call in self.calls]

    def without_columns(self, s):
        """A backward that makes neither dgamma nor dbeta."""
        return self.case.make(self.bench, argparse.Namespace(**dict(vars(s), dgamma=None, dbeta=None)))

    def check(self, form):
        """Whether the form's results are right, those of the first set."""
        s = self.sets[0]
        self.choose(form)
        if hasattr(s, "ours"):  # a check makes its steps itself
            return all(got <= bound for got, bound in self.case.check(self.bench, s))
        for name in self.outputs:
            output = getattr(s, name, None)
            if output is not None:
                output.fill_(float("nan"))
        self.variant(form)[0]()
        self.bench.wait()
        if self.case.op == "moe permute":  # what nobody fills is left as it is
            s.permuted.masked_fill_((s.slot_of_row < 0)[:, None], 0)
        errors = self.case.check(self.bench, s)
        return all(got <= bound for got, bound in errors)

    def beside(self):
        """What is measured beside: (calls, bytes) by name."""
        s, out = self.sets[0], {}
        if hasattr(s, "ours"):
            plan, adamw = s.keep.__defaults__[0]
            each = self.case.bytes // 32
            alone = lambda name: [self.bench.lib.prepare(name, plan, adamw)]
            return {"first kernel alone": (alone("lk_adamw_norm"), 4 * each),
                    "second kernel alone": (alone("lk_adamw_update"), 28 * each)}
        for name, function in self.case.rivals(self.bench).items():
            if self.case.op == "moe permute":
                out["torch, " + name] = ([lambda t=t, function=function: function(t) for t in self.sets], self.case.bytes)
        if self.case.op.endswith("norm backward"):
            out["product, dx alone"] = ([self.without_columns(t) for t in self.sets], self.case.bytes)
        for name, (function, size) in self.case.limits(self.bench).items():
            out["limit: " + name] = ([lambda t=t, function=function: function(t) for t in self.sets], size)
        return out


def measure_case(c, bench, number, family, outputs, case, skipped):
    sets = [case.make_set(bench) for _ in range(1 if isinstance(case, c.Adamw) or bench.options.small else min(case.count_sets(), 8))]
    forms = Forms(bench, family, outputs, case, sets)
    variants, sizes, right = {}, {}, {}
    for form in [-1] + list(range(len(forms.names))):
        name = PRODUCT if form < 0 else "%d %s" % (form, forms.names[form])
        if [number, name] in skipped:
            continue
        say(begin=name, case=number)
        right[name] = forms.check(form)
        variants[name], sizes[name] = forms.variant(form), case.bytes
        say(checked=name, case=number)
    for name, (calls, size) in forms.beside().items():
        forms.choose(-1)
        variants[name], sizes[name] = calls, size
    say(begin="timing", case=number)
    times = bench.measure(variants, case.bytes)
    copies, same = c.copy_rates(bench, times)
    forms.choose(-1)
    for name, us in times.items():
        say(record=dict(c.figures(case, sizes[name], us, copies, same), variant=name, family=family,
                        verified=right.get(name, True)))
    say(done=number)


def work(options):
    sys.path.insert(0, HERE)
    try:
        import compute as c
    except SystemExit:  # it has said what is missing
        return 77
    bench = c.Bench(argparse.Namespace(library=options.library, small=options.small, no_compile=True,
                                       rounds=options.rounds, limit=options.limit))
    if bench.cuda and not c.torch.cuda.is_available():
        return 77
    bench.lib.check(bench.lib.lib.lk_compute_load_all())
    say(machine={"gpu": c.torch.cuda.get_device_name() if bench.cuda else None, "torch": c.torch.__version__})
    skipped = json.loads(options.skip)
    for number, (family, outputs, make) in enumerate(list_cases(c, bench)):
        if number < options.first:
            continue
        if bench.late():
            say(left_out=number)
            continue
        case = make()
        if options.only and not any(case.op.startswith(name) for name in options.only):
            continue
        if options.shapes and case.shape not in options.shapes:
            continue
        say(begin="data", case=number)
        measure_case(c, bench, number, family, outputs, case, skipped)
        if bench.cuda:
            c.torch.cuda.empty_cache()
    say(end=True)
    return 0


# ---- the process that watches ----


class Watch:
    def __init__(self, options):
        self.options, self.records, self.skipped, self.machine = options, [], [], {}
        self.begun, self.first, self.left_out, self.missing, self.failed = time.monotonic(), 0, 0, False, []

    def run(self):
        while self.one_process():
            pass
        if self.missing:
            return 77
        self.summary()
        wrong = [r for r in self.records if not r["verified"]]
        return 1 if wrong or self.failed else 0

    def one_process(self):
        """True if another one is to go on."""
        o = self.options
        left = o.limit - (time.monotonic() - self.begun)
        if left < 1:
            return False
        command = [sys.executable, os.path.abspath(__file__), "--work", "--library", o.library, "--rounds", str(o.rounds),
                   "--limit", str(left), "--first", str(self.first), "--skip", json.dumps(self.skipped)]
        command += ["--small"] * o.small + (["--only", ",".join(o.only)] if o.only else [])
        command += ["--shapes", ",".join(o.shapes)] if o.shapes else []
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = queue.Queue()
        threading.Thread(target=self.read, args=(child.stdout, lines), daemon=True).start()
        self.in_hand, ended = (self.first, "start"), False
        while True:
            try:
                line = lines.get(timeout=o.quiet)
            except queue.Empty:
                child.kill()
                break
            if line is None:
                break
            ended = self.take(line) or ended
        code = child.wait()
        if code == 77:
            self.missing = True
            return False
        if ended or not self.machine:  # in vain, or nothing begins at all
            self.failed += [] if ended else ["the start: %d" % code]
            return False
        return self.give_up(code)

    @staticmethod
    def read(stream, lines):
        for line in stream:
            lines.put(line)
        lines.put(None)

    def take(self, line):
        try:
            message = json.loads(line)
        except ValueError:
            print(line.rstrip(), flush=True)
            return False
        if not isinstance(message, dict):
            return False
        if "machine" in message:
            self.machine = message["machine"]
        if "begin" in message:
            self.in_hand = (message["case"], message["begin"])
        if "record" in message:
            self.records.append(message["record"])
            self.print(message["record"])
            self.write()
        if "done" in message:
            self.first = message["done"] + 1
            self.in_hand = (self.first, "start")
        self.left_out += "left_out" in message
        return "end" in message

    def give_up(self, code):
        """What was in hand is left out from now on; a case whose data or timing failed is left out whole."""
        case, name = self.in_hand
        self.failed.append("case %d: %s" % (case, name))
        print("# case %d, %s: %s" % (case, name, "did not end" if code == -9 else "ended with %d" % code), flush=True)
        if name in ("start", "data", "timing"):
            self.first = case + 1
        else:
            self.skipped.append([case, name])
            self.first = case
        return len(self.failed) < 12

    @staticmethod
    def print(r):
        print("%-21s %-44s %-34s %9.1f %9.1f %9.1f %7.0f %6.1f %% %6.1f %%%s" % (
            r["op"], r["case"], r["variant"], r["median_us"], r["p10"], r["p90"], r["algbw"], 100 * r["copy_share"],
            100 * r["same_size_share"],
            "" if r["verified"] else "  WRONG"), flush=True)

    def write(self):
        if self.options.json:
            with open(self.options.json, "w") as out:
                json.dump({"schema": "loongcomm.bench/1", "machine": self.machine, "command": sys.argv,
                           "failed": self.failed, "records": self.records}, out, indent=1)

    def summary(self):
        cases = {}
        for r in self.records:
            cases.setdefault((r["op"], r["case"]), []).append(r)
        for (op, case), records in cases.items():
            ours = [r for r in records if r["variant"] == PRODUCT or r["variant"][0].isdigit()]
            product = [r for r in ours if r["variant"] == PRODUCT]
            best = min((r for r in ours if r["verified"]), key=lambda r: r["median_us"], default=None)
            if best and product:
                print("# best of %s, %s: %s, %.1f us, %.1f %%, %.3f of the product's time" % (
                    op, case, best["variant"], best["median_us"], 100 * best["copy_share"],
                    best["median_us"] / product[0]["median_us"]))
        wrong = sorted({r["variant"] for r in self.records if not r["verified"]})
        print("# %s; %d cases left out for time; %.0f s; %s%s" % (
            self.machine.get("gpu") or "host library", self.left_out, time.monotonic() - self.begun,
            "WRONG: %s" % ", ".join(wrong) if wrong else "results right",
            "; NOT ENDED: %s" % ", ".join(self.failed) if self.failed else ""))
        self.write()


def find_library():
    places = [os.path.join(ROOT, build, "kernels/libloongkernels-forms.so") for build in ("build-gpu-kernels", "build")]
    return next((place for place in places if os.path.exists(place)), places[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--library", default=find_library())
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--shapes", type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--limit", type=float, default=110)
    parser.add_argument("--quiet", type=float, default=25)
    parser.add_argument("--json")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="[]", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        sys.exit(work(options))
    print("%-21s %-44s %-34s %9s %9s %9s %7s %8s %8s" % ("operation", "case", "form", "median us", "p10", "p90", "GB/s",
                                                         "of copy", "of same"), flush=True)
    sys.exit(Watch(options).run())
