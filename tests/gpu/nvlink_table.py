#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nvlink_table.py BENCH.jsonl: what nvlink_day.sh measured, the best of each case first."""
import json
import sys

BEST = 8  # of each case


def link(rows):
    print(f"{'link':<14}{'CTAs':>5}{'window':>8}  {'':<22}{'GB/s':>8}{'least':>8}{'most':>8}")
    for r in rows:
        how = " ".join(name for name, on in (("both", r["both"]), ("fences", r["fences"]), ("domain", r["same_domain"])) if on)
        print(f"{r['how']:<14}{r['ctas']:>5}{r['window_mb']:>5} MB  {how:<22}{r['gbs']:>8.1f}{r['least']:>8.1f}{r['most']:>8.1f}")


def describe(r):
    return (f"  {r['name'][:40]:<41}{r['ctas']:>4}{r['channels']:>5}{r['slots']:>4}  {r['memory']:<6}{r['median_us']:>9.2f}"
            f"{r['p10']:>9.2f}{r['p90']:>9.2f}{r['x_nccl']:>8.3f}{r['x_base']:>8.3f}{'' if r['verified'] else '  WRONG'}")


def sums(rows):
    cases = {}
    for r in rows:
        cases.setdefault(r["case"], []).append(r)
    print(f"{'case and variant':<43}{'CTAs':>4}{'ch':>5}{'sl':>4}  {'memory':<6}{'us':>9}{'p10':>9}{'p90':>9}{'x NCCL':>8}{'x ours':>8}")
    for case, all_rows in cases.items():
        print(case)
        all_rows.sort(key=lambda r: r["median_us"])
        shown = [r for r in all_rows if r["variant"] > 0][:BEST]
        shown += [r for r in all_rows if r["variant"] <= 0 or not r["verified"]]
        unique = {id(r): r for r in shown}
        for r in sorted(unique.values(), key=lambda r: r["median_us"]):
            print(describe(r))


def beside(rows):
    print(f"{'beside products':<43}{'CTAs':>4}{'product':>10}{'beside':>9}{'':>7}{'sum':>10}{'beside':>9}")
    for r in rows:
        slower = r["product_beside_us"] / r["product_alone_us"]
        print(f"  {r['case'] + ', ' + r['name']:<41.41}{r['ctas']:>4}{r['product_alone_us']:>10.1f}{r['product_beside_us']:>9.1f}"
              f"{slower:>7.3f}{r['sum_alone_us']:>10.1f}{r['sum_beside_us']:>9.1f}{r['sum_beside_us'] / r['sum_alone_us']:>7.3f}")


def main():
    rows = []
    with open(sys.argv[1], encoding="utf-8") as lines:
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:  # cut short
                continue
    for schema, show in (("loongcomm.link/1", link), ("loongcomm.peers/1", sums), ("loongcomm.beside/1", beside)):
        of_schema = [r for r in rows if r.get("schema") == schema]
        if of_schema:
            show(of_schema)


if __name__ == "__main__":
    main()
