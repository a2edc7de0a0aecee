#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs one test of the preloaded library against libraries that stand for NCCL.

interpose.py TEST KEY=PATH...: the keys are lib, proxy, app, bare (an app without NCCL), user (a library linked
with NCCL), locks, noop, fake_RELEASE, symbols (prints what lib must export)."""
import ctypes
import json
import os
import re
import resource
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time

PATHS = dict(arg.split('=', 1) for arg in sys.argv[2:])
NEWEST = '22809'
SKIP = 77
TMP = tempfile.mkdtemp(prefix='loongcomm-test-')


def check(condition, *what):
    if not condition:
        print('FAILED:', *what)
        raise SystemExit(1)


def nccl_folder(key, name='libnccl.so.2'):
    """A folder that holds the library under NCCL's file name."""
    folder = os.path.join(TMP, key)
    os.makedirs(folder, exist_ok=True)
    link = os.path.join(folder, name)
    if not os.path.exists(link):
        os.symlink(PATHS[key], link)
    return folder


def run(*args, release=NEWEST, preload=('lib',), code=0, folders=None, **env):
    """Runs a program; folders go into LD_LIBRARY_PATH, by default the fake NCCL of a release."""
    full = {k: v for k, v in os.environ.items() if not k.startswith('LOONGCOMM_')}
    full['LD_LIBRARY_PATH'] = ':'.join(folders if folders is not None else [nccl_folder('fake_' + release)])
    full['LD_PRELOAD'] = ':'.join(PATHS.get(key, key) for key in preload)
    full.update(env)
    done = subprocess.run([PATHS.get(args[0], args[0]), *args[1:]], env=full, capture_output=True, text=True,
                          timeout=110)
    check(done.returncode == code, args, 'ended with', done.returncode, done.stdout, done.stderr)
    return done


def report(*args, **more):
    """The JSON report of a run of the app."""
    done = run('app', *args, LOONGCOMM_REPORT='json', **more)
    return json.loads(done.stderr[done.stderr.index('{'):])


def operations(comm):
    return {op['op']: op['paths'][0] for op in comm['operations']}


def since():
    text = open(PATHS['listing']).read()
    return {name: int(release) for name, release in re.findall(r'^LC_NCCL\w*\((\w+), (\d+)', text, re.M)}


def every_release(release):
    plain = run('app', 'every_function', preload=()).stdout if release == NEWEST else None
    done = run('app', 'every_function', release=release, LOONGCOMM_REPORT='off')
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith('nccl')]
    check(len(lines) > 25, done.stdout)
    missing = 0
    for name, result, calls in lines:
        there = since()[name] <= int(release)
        missing += not there
        check(result == ('0' if there else '2'), release, name, result)
        check((int(calls) >= 1) == there, release, name, calls)
        check(there or len(re.findall(rf'{name} was called, but NCCL {release} in \S+ has no such function',
                                      done.stderr)) == 1, done.stderr)
    check(len(done.stderr.splitlines()) == missing, done.stderr)
    check(plain is None or plain == done.stdout, 'differs from plain', plain, done.stdout)


def release_2_18():
    every_release('21805')


def release_2_21():
    every_release('22105')


def release_2_27():
    every_release('22705')


def release_2_28():
    every_release('22809')


def calls_and_bytes_are_counted():
    out = report('every_function')
    check(out['schema'] == 'loongcomm.report/1' and out['enabled'] and out['rank'] == 0 and out['ranks'] == 4, out)
    check(out['nccl']['version'] == '2.28.9' and out['nccl']['path'].endswith('libnccl.so.2'), out['nccl'])
    comm = out['communicators'][0]
    check((comm['number'], comm['ranks'], comm['device'], comm['closed'], comm['windows']) == (0, 4, 3, True, 1), comm)
    got = {name: (op['calls'], op['bytes_asked'], op['bytes_sent'], op['path']) for name, op in operations(comm).items()}
    want = {'AllReduce': 12, 'ReduceScatter': 24, 'AllGather': 3, 'AlltoAll': 48, 'Reduce': 12, 'Gather': 12,
            'Scatter': 48, 'Send': 24, 'Recv': 24}
    want = {name: (1, size, size, 'nccl') for name, size in want.items()}
    want['Broadcast'] = (2, 24, 24, 'nccl')
    check(got == want, got, want)
    check(operations(comm)['AllReduce']['reason'] == 'no-faster-path', comm)
    sizes = {op['op']: op['sizes'] for op in comm['operations']}
    check(sizes['Broadcast'] == [{'from': 8, 'count': 2}], sizes)
    check(out['groups'] == [{'from': 2, 'count': 1}], out['groups'])


def nested_calls_are_counted_once():
    run('app', 'nested', preload=())
    run('app', 'nested')
    out = report('nested')
    check([len(comm['operations']) for comm in out['communicators']] == [0, 1], out)
    check(operations(out['communicators'][1])['Broadcast']['calls'] == 1, out)
    check([comm['device'] for comm in out['communicators']] == [0, 1], out)


def every_way_of_making_a_communicator():
    run('app', 'communicators', preload=())
    out = report('communicators')
    got = [(c['number'], c['origin'], c['parent'], c['ranks'], c['rank'], c['name'], c['closed'],
            operations(c)['AllReduce']['bytes_asked'] if c['operations'] else 0) for c in out['communicators']]
    want = [(0, 'init', None, 4, 0, None, False, 1),
            (1, 'split', 0, 2, 1, 'tensor parallel group with a na', True, 2),
            (2, 'split', 0, 2, 0, None, False, 3),
            (3, 'init', None, 8, 0, None, False, 0),
            (4, 'adopted', None, 4, 2, None, False, 4),
            (5, 'init', None, 2, 0, None, True, 6)]
    check(got == want, got)
    check(out['ranks'] == 8, out)


def text_report_is_readable():
    done = run('app', 'many_small')
    text = re.sub(r'process \d+ on \S+', 'process N on HOST', done.stderr)
    text = re.sub(r'loongcomm [\d.]+:', 'loongcomm V:', re.sub(r'/\S+/libnccl', '/libnccl', text))
    check(text == golden('report.txt'), 'got:\n' + text, 'want:\n' + golden('report.txt'))


def only_rank_0_prints_the_table():
    done = run('app', 'many_small', RANK='2')
    check(re.fullmatch(r'loongcomm \S+: rank 2 of 4: 207 calls, 4.1 MiB asked, 4.1 MiB sent\n', done.stderr), done.stderr)
    check(run('app', 'many_small', RANK='2', RANKS='65').stderr == '')
    check(run('app', 'many_small', RANK='2', LOONGCOMM_REPORT='json').stderr == '')
    check(run('app', 'many_small', LOONGCOMM_REPORT='off').stderr == '')


def folder_gets_one_file_per_process():
    folder = os.path.join(TMP, 'reports')
    for rank in ('0', '3'):
        done = run('app', 'many_small', RANK=rank, LOONGCOMM_REPORT='json', LOONGCOMM_DIR=folder)
        check(done.stderr == '', done.stderr)
    run('app', 'many_small', RANK='1', LOONGCOMM_DIR=folder)
    check(stat.S_IMODE(os.stat(folder).st_mode) == 0o700, oct(os.stat(folder).st_mode))
    names = sorted(os.listdir(folder))
    check(len(names) == 3, names)
    for name in names:
        check(re.fullmatch(r'loongcomm-\S+-\d+-rank[013]\.(json|txt)', name), name)
        check(stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600, name)
        if name.endswith('json'):
            check(json.load(open(os.path.join(folder, name)))['ranks'] == 4, name)
        else:
            check('hint: 200 of 201' in open(os.path.join(folder, name)).read(), name)
    done = run('app', 'many_small', LOONGCOMM_DIR=os.path.join(PATHS['app'], 'x'))
    check('cannot write a report into' in done.stderr, done.stderr)


def output_that_nobody_takes_does_not_end_the_program():
    """A closed pipe and a limit of file size raise signals that end a program that does not expect them."""
    env = dict(os.environ, LD_PRELOAD=PATHS['lib'], LD_LIBRARY_PATH=nccl_folder('fake_' + NEWEST))
    reader, writer = os.pipe()
    os.close(reader)
    for more in ({}, {'LOONGCOMM_REPORT': 'off', 'LOONGCOMM_LOG_LEVEL': 'trace'}):
        done = subprocess.run([PATHS['app'], 'many_small'], env=dict(env, **more), stdout=subprocess.PIPE,
                              stderr=writer, timeout=60)
        check((done.returncode, done.stdout) == (0, b'done\n'), more, done.returncode)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    for more in ({'LOONGCOMM_DIR': TMP}, {'LOONGCOMM_LOG_FILE': os.path.join(TMP, 'log'), 'LOONGCOMM_LOG_LEVEL': 'trace'}):
        done = subprocess.run([PATHS['app'], 'many_small'], env=dict(env, **more), capture_output=True, timeout=60,
                              preexec_fn=limit)
        check((done.returncode, done.stdout) == (0, b'done\n'), more, done.returncode)


def any_host_name_fits_into_the_name_of_a_report():
    name = 'a/' + 62 * 'x' # the longest that Linux takes; it allows any byte
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x04000000) != 0 or libc.sethostname(name.encode(), len(name)) != 0: # CLONE_NEWUTS
        print('no host name may be set here:', os.strerror(ctypes.get_errno()))
        raise SystemExit(SKIP)
    folder = os.path.join(TMP, 'reports')
    done = run('app', 'many_small', LOONGCOMM_REPORT='json', LOONGCOMM_DIR=folder)
    check(done.stderr == '', done.stderr)
    file, = os.listdir(folder)
    check(file.startswith('loongcomm-' + name.replace('/', '_') + '-'), file)
    check(json.load(open(os.path.join(folder, file)))['host'] == name)


def switched_off_passes_straight_through():
    plain = run('app', 'every_function', preload=()).stdout
    done = run('app', 'every_function', LOONGCOMM_ENABLE='0')
    check(done.stdout == plain, done.stdout)
    check('disabled by LOONGCOMM_ENABLE' in done.stderr, done.stderr)
    out = report('every_function', LOONGCOMM_ENABLE='0')
    check(not out['enabled'] and not any(comm['operations'] for comm in out['communicators']), out)


def library_opened_local_is_found():
    folder = [nccl_folder('fake_' + NEWEST)]
    done = run('bare', 'local', PATHS['user'], folders=folder, LOONGCOMM_REPORT='json')
    out = json.loads(done.stderr)
    check(operations(out['communicators'][0])['AllReduce']['bytes_asked'] == 8, out)


def forked_child_does_not_report():
    done = run('app', 'forks')
    check(done.stderr.count('communicator #') == 1 and '1 calls' in done.stderr, done.stderr)


def exec_starts_afresh():
    done = run('app', 'execs')
    check(done.stderr.count('loongcomm ') == 1 and '200 of 201' in done.stderr, done.stderr)


def silent_where_nccl_is_not_used():
    for args in (('bare', 'nothing'), ('app', 'nothing'), ('/bin/bash', '-c', '/bin/true; echo done')):
        done = run(*args)
        check(done.stdout == 'done\n' and done.stderr == '', args, done.stderr)


def needs_libc_only_and_opens_nothing():
    out = subprocess.run(['readelf', '-dW', PATHS['lib']], check=True, capture_output=True, text=True).stdout
    needed = [n for n in re.findall(r'NEEDED.*\[(.*)\]', out) if not re.match(r'lib[atu]b?san', n)]
    check(set(needed) <= {'libc.so.6', 'ld-linux-aarch64.so.1', 'ld-linux-x86-64.so.2'}, needed)
    check('TEXTREL' not in out, out)
    if not shutil.which('strace'):
        print('strace is not installed: what is opened was not looked at')
        raise SystemExit(SKIP)

    def opened(preload):
        log = os.path.join(TMP, 'strace')
        subprocess.run(['strace', '-f', '-o', log, '-e', 'trace=open,openat,socket,clone,fork,vfork',
                        '-E', 'LD_PRELOAD=' + preload, '/bin/true'], check=True, capture_output=True)
        lines = [re.sub(r'^\d+\s+', '', line) for line in open(log)]
        return [line for line in lines if 'exited' not in line and (not preload or preload not in line)]
    plain, ours = opened(''), opened(PATHS['lib'])
    check(plain == ours, 'plain:', plain, 'preloaded:', ours)


def exports_are_the_listed_ones():
    wanted = set(subprocess.run([PATHS['symbols']], check=True, capture_output=True, text=True).stdout.split())
    out = subprocess.run(['nm', '-D', '--defined-only', PATHS['lib']], check=True, capture_output=True, text=True).stdout
    found = {line.split()[-1] for line in out.splitlines()}
    check(len(wanted) > 25 and found == wanted, 'missing:', wanted - found, 'extra:', found - wanted)
    unlisted = {name for name in wanted if name.startswith('nccl')} - set(since())
    check(not unlisted, 'not in nccl.def:', unlisted)


def no_lock_on_the_call_path():
    done = run('locks', folders=[nccl_folder('noop')], LOONGCOMM_REPORT='off')
    # With an agreement a group remembers its communicators and streams.
    check(re.fullmatch(r'locks 0, allocations 0\nlocks 0, allocations \d+\n', done.stdout), done.stdout)


def loaded(done):
    """The files that served as NCCL, or were ours, from what opener printed."""
    return {os.path.basename(line) for line in done.stdout.split() if line.startswith('/')}


def used_fake(release=NEWEST):
    return {'libnccl.so.2', 'libloongcomm.so', f'libfake_nccl_{release}.so'}


def proxy_folder():
    return os.path.dirname(PATHS['proxy'])


def check_counted(done):
    out = json.loads(done.stderr[done.stderr.index('{'):])
    check(operations(out['communicators'][0])['AllReduce']['calls'] == 2, out)
    check(not out['nccl']['path'].startswith(proxy_folder()), out['nccl'])


def proxy_serves_a_program_that_opens_nccl():
    folders = [proxy_folder(), nccl_folder('fake_' + NEWEST)]
    for preload in ((), ('lib',)):
        done = run('opener', 'use', preload=preload, folders=folders, LOONGCOMM_REPORT='json')
        check_counted(done)
        check(loaded(done) == used_fake(), done.stdout)
    done = run('opener', 'use', preload=(), folders=[nccl_folder('fake_' + NEWEST)])
    check(done.stderr == '' and loaded(done) == {f'libfake_nccl_{NEWEST}.so'}, done.stdout, done.stderr)


def proxy_serves_a_program_that_was_linked_with_nccl():
    plain = run('app', 'every_function', preload=(), LOONGCOMM_REPORT='off').stdout
    folders = [proxy_folder(), nccl_folder('fake_' + NEWEST)]
    for preload in ((), ('lib',)):
        # fake_count() is not in the proxy: results only
        done = run('app', 'use', preload=preload, folders=folders, LOONGCOMM_REPORT='json')
        check_counted(done)
    check(plain)


def proxy_takes_the_nccl_it_is_told():
    done = run('opener', 'use', preload=(), folders=[proxy_folder()], LOONGCOMM_NCCL=PATHS['fake_22105'],
               LOONGCOMM_REPORT='json')
    check_counted(done)
    check(loaded(done) == used_fake('22105'), done.stdout)
    done = run('opener', 'missing', preload=(), folders=[proxy_folder(), nccl_folder('fake_' + NEWEST)],
               LOONGCOMM_NCCL='/nowhere/libnccl.so.2')
    check(done.stderr.count('\n') == 1 and 'LOONGCOMM_NCCL names /nowhere/libnccl.so.2' in done.stderr, done.stderr)
    check(done.stdout.splitlines()[1].startswith('2 2 2 loongcomm: the real NCCL'), done.stdout)
    os.mkfifo(os.path.join(TMP, 'fifo'))
    done = run('opener', 'missing', preload=(), folders=[proxy_folder()], LOONGCOMM_NCCL=os.path.join(TMP, 'fifo'))
    check('fifo: it is no regular file' in done.stderr, done.stderr)


def proxy_looks_below_the_interpreter():
    """A virtual environment: bin/python beside lib/python3.N/site-packages."""
    packages = os.path.join(TMP, 'venv/lib/python3.11/site-packages/nvidia/nccl/lib')
    os.makedirs(packages)
    os.makedirs(os.path.join(TMP, 'venv/bin'))
    os.symlink(PATHS['fake_22705'], os.path.join(packages, 'libnccl.so.2'))
    python = os.path.join(TMP, 'venv/bin/python')
    os.symlink(PATHS['opener'], python)
    done = run(python, 'use', preload=(), folders=[proxy_folder()], LOONGCOMM_REPORT='json')
    check_counted(done)
    check(loaded(done) == used_fake('22705'), done.stdout)


def proxy_never_loads_a_second_nccl():
    """NCCL is loaded already when the proxy is opened by its path, and others are to be found."""
    folders = [nccl_folder('fake_' + NEWEST)]
    for preload in (('fake_' + NEWEST,), ('lib', 'fake_' + NEWEST)):
        done = run('opener', 'use', PATHS['proxy'], preload=preload, folders=folders,
                   LOONGCOMM_NCCL=PATHS['fake_22105'], LOONGCOMM_REPORT='json')
        check_counted(done)
        check(loaded(done) == used_fake(), done.stdout)


def proxy_alone_uses_the_nccl_in_use():
    """Without libloongcomm.so beside it the proxy goes straight to NCCL, and still takes the one that is loaded."""
    alone = os.path.join(TMP, 'alone')
    os.mkdir(alone)
    shutil.copy(PATHS['proxy'], alone)
    done = run('opener', 'use', os.path.join(alone, 'libnccl.so.2'), preload=('fake_' + NEWEST,),
               folders=[nccl_folder('fake_' + NEWEST)], LOONGCOMM_NCCL=PATHS['fake_22105'])
    check(loaded(done) == {'libnccl.so.2', f'libfake_nccl_{NEWEST}.so'}, done.stdout)
    check(done.stderr.count('\n') == 1 and 'libloongcomm.so is not beside' in done.stderr, done.stderr)


def proxy_says_why_the_library_beside_it_cannot_be_used():
    folder = os.path.join(TMP, 'broken')
    os.mkdir(folder)
    shutil.copy(PATHS['proxy'], folder)
    with open(os.path.join(folder, 'libloongcomm.so'), 'w') as file:
        file.write('no library')
    done = run('opener', 'use', os.path.join(folder, 'libnccl.so.2'), preload=(), folders=[nccl_folder('fake_' + NEWEST)])
    check(loaded(done) == {'libnccl.so.2', f'libfake_nccl_{NEWEST}.so'}, done.stdout)
    check(done.stderr.count('\n') == 1 and 'libloongcomm.so' in done.stderr and 'too short' in done.stderr, done.stderr)


def proxy_says_what_the_real_nccl_lacks():
    done = run('opener', 'missing', preload=(), folders=[proxy_folder(), nccl_folder('fake_21805')],
               LOONGCOMM_REPORT='off')
    check(done.stdout == '4 0 5 a text of the fake\n' * 2 + 'done\n', done.stdout)
    check(done.stderr.count('\n') == 1 and 'ncclCommGrow was called, but NCCL in' in done.stderr, done.stderr)


def proxy_keeps_every_argument():
    run('opener', 'arguments', preload=(), folders=[proxy_folder()], LOONGCOMM_NCCL=PATHS['args'])


def proxy_is_resolved_by_many_threads_at_once():
    done = run('opener', 'race', preload=(), folders=[proxy_folder(), nccl_folder('fake_' + NEWEST)])
    check(loaded(done) == used_fake(), done.stdout)


def proxy_searches_in_many_threads_at_once():
    done = run('opener', 'search_in_vain', preload=(), folders=[proxy_folder()], LOONGCOMM_NCCL='/nowhere')
    check(done.stderr.count('\n') == 1, done.stderr)


def proxy_does_nothing_before_the_first_call():
    done = run('opener', 'nothing', preload=(), folders=[proxy_folder()])
    check(done.stderr == '', done.stderr)
    out = subprocess.run(['readelf', '-dW', PATHS['proxy']], check=True, capture_output=True, text=True).stdout
    check('soname: [libnccl.so.2]' in out and 'TEXTREL' not in out, out)


def proxy_exports_every_function_of_nccl():
    wanted = {'loongcommProxyNccl'}
    for bare, name in re.findall(r'^LC_NCCL(_BARE)?\((\w+)', open(PATHS['listing']).read(), re.M):
        wanted |= {name} if bare else {name, 'p' + name}
    out = subprocess.run(['nm', '-D', '--defined-only', PATHS['proxy']], check=True, capture_output=True, text=True).stdout
    found = {line.split()[-1] for line in out.splitlines()}
    check(len(wanted) > 150 and found == wanted, 'missing:', wanted - found, 'extra:', found - wanted)


def list_covers_the_header():
    text = re.sub(r'/\*.*?\*/', '', open(PATHS['header']).read(), flags=re.S)
    declared = set(re.findall(r'\b(nccl[A-Z]\w*) *\([^;{}]*\) *;', text))
    check(len(declared) > 30 and declared <= set(since()), declared - set(since()))


def job(label, ranks, per_rank=lambda rank: {}, said={}):
    """Runs a job on the rig: the results of each rank, the device work that each reported, and their reports.
    per_rank gives variables; None takes one away. said: what some ranks say."""
    folder = os.path.join(TMP, f'{label}-{ranks}')
    os.mkdir(folder)
    running = []
    for rank in range(ranks):
        env = {k: v for k, v in os.environ.items() if not k.startswith('LOONGCOMM_')}
        env.update(RANK=str(rank), LCRIG_RANK=str(rank), WORLD_SIZE=str(ranks), LD_LIBRARY_PATH=PATHS['rig'],
                   LOONGCOMM_REPORT='json', LOONGCOMM_DIR=folder, LD_PRELOAD=PATHS['lib'])
        env.update(per_rank(rank))
        env = {k: v for k, v in env.items() if v is not None}
        running.append(subprocess.Popen([PATHS['rank'], folder], env=env, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True))
    try:
        done = [process.communicate(timeout=100) for process in running]
    finally:
        for process in running:
            process.kill()
    for rank, (process, (out, err)) in enumerate(zip(running, done)):
        check(process.returncode == 0 and (said[rank] in err if rank in said else err == ''), label, rank,
              process.returncode, out, err)
    results = [open(os.path.join(folder, f'result.{rank}'), 'rb').read() for rank in range(ranks)]
    reports = [json.load(open(os.path.join(folder, name))) for name in os.listdir(folder) if name.endswith('.json')]
    return results, [int(out) for out, _ in done], sorted(reports, key=lambda one: one['rank'])


def results_on_the_rig_equal_plain_ones():
    for ranks in (2, 3, 4):
        plain, plain_work, none = job('plain', ranks, lambda rank: {'LD_PRELOAD': None})
        check(not none and len(plain[0]) > 6 * 12 * 100000 and any(plain[0]), len(plain[0]))
        ours, work, reports = job('preloaded', ranks, lambda rank: {'LOONGCOMM_COALESCE': 'no'})
        check(ours == plain, 'results differ')
        check(work == plain_work and min(work) > 100, 'device work added', work, plain_work)
        check([one['rank'] for one in reports] == list(range(ranks)), reports)
        for one in reports:
            world, half = one['communicators']
            calls = {op['op']: sum(path['calls'] for path in op['paths']) for op in world['operations']}
            check(calls == {'AllReduce': 20, 'ReduceScatter': 5, 'AllGather': 5, 'AlltoAll': 5, 'Broadcast': 10,
                            'Reduce': 5, 'Gather': 5, 'Scatter': 5, 'Send': 5 * ranks, 'Recv': 5 * ranks}, calls)
            check((half['origin'], half['parent'], world['device']) == ('split', 0, one['rank']), one)


def rank_without_the_library_harms_nothing():
    plain, _, _ = job('plain', 3, lambda rank: {'LD_PRELOAD': None})
    ours, _, reports = job('without', 3, lambda rank: {'LD_PRELOAD': None} if rank == 1 else {})
    check(ours == plain and [one['rank'] for one in reports] == [0, 2], reports)


def rank_that_is_switched_off_harms_nothing():
    plain, _, _ = job('plain', 3, lambda rank: {'LD_PRELOAD': None})
    ours, _, reports = job('off', 3, lambda rank: {'LOONGCOMM_ENABLE': 'no'} if rank == 0 else {},
                             {1: 'or has it switched off'})
    check(ours == plain and [one['enabled'] for one in reports] == [False, True, True], reports)


def rank_behind_the_proxy_harms_nothing():
    plain, _, _ = job('plain', 2, lambda rank: {'LD_PRELOAD': None})
    path = proxy_folder() + ':' + PATHS['rig']
    ours, _, reports = job('proxy', 2, lambda rank: {'LD_PRELOAD': None, 'LD_LIBRARY_PATH': path} if rank == 1 else {})
    check(ours == plain and [one['rank'] for one in reports] == [0, 1], reports)


def rank_that_ends_early_harms_nothing():
    """Nor does a call that NCCL refuses."""
    for preload in (None, PATHS['lib']):
        folder = tempfile.mkdtemp(dir=TMP)
        running = []
        for rank in range(2):
            env = {k: v for k, v in os.environ.items() if not k.startswith('LOONGCOMM_')}
            env.update(RANK=str(rank), LCRIG_RANK=str(rank), LCRIG_LEAKS='0', LD_LIBRARY_PATH=PATHS['rig'],
                       LOONGCOMM_REPORT='off', LOONGCOMM_ALLREDUCE_WIRE='bf16', LOONGCOMM_MIN_BYTES='0', LOONGCOMM_LOG_LEVEL='info')
            env.update({'LD_PRELOAD': preload} if preload else {})
            running.append(subprocess.Popen([PATHS['leaver'], folder], env=env, stderr=subprocess.PIPE, text=True))
        try:
            errors = [process.communicate(timeout=110)[1] for process in running]
        finally:
            for process in running:
                process.kill()
        check([process.returncode for process in running] == [0, 0], preload, errors)
        check(not preload or all('committed at' in text for text in errors), errors)


def hang(case, *expect_hangs, **env):
    """What a job of three ranks, one of which misbehaves, leaves: the hang reports by rank, standard error, fates."""
    folder = os.path.join(TMP, case)
    os.mkdir(folder)
    # A busy machine may keep a rank from its call for a second.
    settings = dict(LOONGCOMM_HANG_TIMEOUT='3', LOONGCOMM_DIR=folder, LOONGCOMM_REPORT='json', LCRIG_LEAKS='0',
                    LOONGCOMM_LOG_FILE=os.path.join(folder, 'log'))
    settings.update(env)
    done = run('hang', case, folder, folders=[PATHS['rig']], **settings)
    if os.path.exists(settings['LOONGCOMM_LOG_FILE']):
        done.stderr += open(settings['LOONGCOMM_LOG_FILE']).read()
    reports = [json.load(open(os.path.join(folder, name))) for name in sorted(os.listdir(folder))
               if name.endswith('.hang.json')]
    check(len(reports) in (expect_hangs or (3,)), done.stdout, done.stderr, os.listdir(folder))
    for one in reports:
        check(one['schema'] == 'loongcomm.hang/1', one)
    return {one['communicator']['rank']: one for one in reports}, done, folder


def hang_names_who_has_not_arrived():
    reports, done, _ = hang('late')
    check(done.stdout == 'rank 0: 0\nrank 1: 0\nrank 2: 0\n', done.stdout)
    for rank, one in reports.items():
        found = one['finding']
        check(one['blames'] and re.match(r'not arrived on #3 all-reduce \(sum\) of 4096 float32: rank 2 \(process \d+ '
                                         r'is at #2, its last call was [\d.]+ s ago\)$', one['verdict']), one)
        check([(m['rank'], m['presence'], m['collectives']) for m in found['missing']] == [(2, 'here', 2)], found)
        check((found['at'], found['foremost'], found['differing_ranks']) == (3, 3, 0), found)
        awaited = found['awaited']
        check((awaited['seq'], awaited['call'], awaited['count'], awaited['bytes'], awaited['type'], awaited['path']) ==
              (3, 'AllReduce', 4096, 16384, 'float32', 'nccl'), awaited)
        comm = one['communicator']
        check(comm['collectives'] == (2 if rank == 2 else 3) and len(comm['recent']) == comm['collectives'], comm)
        check(comm['age_ms'] >= 2900, comm)
    check(len({one['communicator']['id'] for one in reports.values()}) == 1, reports)
    check(len(re.findall('rank 0 of 3, .*: not arrived on #3 .*we go on waiting', done.stderr)) == 1, done.stderr)
    check(len(re.findall(r'going on at #\d+', done.stderr)) == 3 and len(done.stderr.splitlines()) == 4, done.stderr)


def idle_job_blames_nobody():
    reports, done, _ = hang('idle')
    check(done.stderr == '' and not any(one['blames'] for one in reports.values()), done.stderr, reports)
    check(reports[1]['verdict'] == 'all ranks have called the same 1 collectives: idle, or stuck inside the last one')
    done = hang('idle_lines', 0, LOONGCOMM_DIR='', LOONGCOMM_REPORT='off', LOONGCOMM_LOG_LEVEL='info')[1]
    check(len(re.findall('all ranks have called the same', done.stderr)) == 3, done.stderr)


def ranks_that_differ_are_named():
    reports, done, _ = hang('differs')
    for one in reports.values():
        found = one['finding']
        check((found['rank_a'], found['call_a']['count'], found['rank_b'], found['call_b']['count'],
               found['call_a']['seq'], found['differing_ranks'], found['missing_ranks']) == (0, 4096, 1, 7, 2, 1, 0), found)
    check('rank 0 called all-reduce (sum) of 4096 float32, rank 1 called all-reduce (sum) of 7 float32' in done.stderr,
          done.stderr)


def hang_reports_tell_the_paths_of_calls():
    reports, done, _ = hang('messages', LOONGCOMM_KERNELS=PATHS['kernels'], LOONGCOMM_PEER='force', LOONGCOMM_SCRATCH='1m',
                            LOONGCOMM_EXCHANGE_MIN_BYTES='1000', LOONGCOMM_LOG_LEVEL='info')
    check(len(reports) == 3, done.stdout, done.stderr)
    for one in reports.values():
        comm = one['communicator']
        check([(call['call'], call['path']) for call in comm['recent']] == [('Broadcast', 'nccl')], comm)
        check((comm['message']['call'], comm['message']['path']) == ('Recv', 'rings'), comm)


def kernels_that_are_no_file_are_said_at_once():
    fifo = os.path.join(TMP, 'fifo')
    os.mkfifo(fifo)
    _, done, _ = hang('late', LOONGCOMM_KERNELS=fifo, LOONGCOMM_PEER='force')
    check('LOONGCOMM_KERNELS=%s: no kernels library that fits (it is no regular file)' % fifo in done.stderr, done.stderr)


def killed_rank_is_named():
    reports, done, _ = hang('killed', 2)
    check(sorted(reports) == [0, 2] and 'rank 1: 9\n' in done.stdout, reports, done.stdout)
    for one in reports.values():
        check([(m['rank'], m['presence']) for m in one['finding']['missing']] == [(1, 'lost')], one)
        check('rank 1 (process' in one['verdict'] and 'has ended without goodbye' in one['verdict'], one)


def killed_arbiter_leaves_what_each_rank_knows():
    reports, done, _ = hang('arbiter_killed', 2)
    check(sorted(reports) == [1, 2] and 'rank 0: 9\n' in done.stdout, reports, done.stdout)
    for one in reports.values():
        check(one['blames'] and one['finding'] is None and one['communicator']['recent'][-1]['seq'] == 2, one)


def stopped_rank_is_named():
    reports, done, _ = hang('stopped', 2, 3)  # the stopped one may end before it comes to write
    check([(m['rank'], m['presence']) for m in reports[0]['finding']['missing']] == [(1, 'silent')], reports[0])
    check('rank 1 (process' in done.stderr and 'does not answer' in done.stderr, done.stderr)


def watchdog_can_be_switched_off():
    done = hang('pause', 0, LOONGCOMM_HANG_TIMEOUT='0')[1]
    check(done.stderr == '', done.stderr)


def golden(name):
    return open(os.path.join(os.path.dirname(__file__), name)).read()


def every_kind_of_line_of_the_report():
    for kind, file in (('text', 'report_full.txt'), ('line', 'report_line.txt'), ('json', 'report.json')):
        text = run('test_report', kind, preload=()).stdout
        if kind == 'json':
            json.loads(text)
        check(text == golden(file), 'got:\n' + text, 'want:\n' + golden(file))


def nccl_that_comes_late_is_found():
    folder = [nccl_folder('fake_' + NEWEST)]
    done = run('bare', 'late', PATHS['user'], folders=folder, LOONGCOMM_REPORT='json')
    check(done.stdout.startswith('no NCCL\n'), done.stdout)
    check(operations(json.loads(done.stderr)['communicators'][0])['AllReduce']['calls'] == 1, done.stderr)


def functions_are_not_gathered_from_two_nccls():
    """The first of two lacks ncclAlltoAll, which the second has."""
    done = run('app', 'every_function', release='21805', preload=('lib', 'fake_21805', 'second'), LOONGCOMM_REPORT='off')
    check('ncclAlltoAll 2 0\n' in done.stdout and 'ncclAllReduce 0 1\n' in done.stdout, done.stdout)


def tracer_behind_us_is_not_skipped():
    done = run('app', 'many_small', preload=('lib', 'tracer'), LOONGCOMM_REPORT='json')
    check('traced 201 all-reduces\n' in done.stdout, done.stdout)
    out = json.loads(done.stderr)
    check(operations(out['communicators'][0])['AllReduce']['calls'] == 201, out)


def overhead():
    """A benchmark: prints, decides nothing."""
    folders = [nccl_folder('noop')]
    plain, ours, agreeing, off = (
        float(run('overhead', *args, folders=folders, preload=preload, LOONGCOMM_REPORT='off', **env).stdout)
        for preload, args, env in (((), (), {}), (('lib',), (), {}), (('lib',), ('agreeing',), {}),
                                   (('lib',), (), {'LOONGCOMM_ENABLE': '0'})))
    print(f'plain {plain:.1f} ns, preloaded {ours:.1f} ns, with an agreement {agreeing:.1f} ns, switched off {off:.1f} ns '
          f'a call; passing through costs {ours - plain:.1f} ns, with an agreement {agreeing - plain:.1f} ns')


def start_up():
    """A benchmark: what preloading adds to a program that does nothing."""
    times = {'': [], PATHS['lib']: []}
    for _ in range(200):
        for preload, seen in times.items():
            env = dict(os.environ, LD_PRELOAD=preload)
            start = time.monotonic()
            os.waitpid(os.posix_spawn('/bin/true', ['true'], env), 0)
            seen.append((time.monotonic() - start) * 1e6)
    least, middle = ([pick(seen) for seen in times.values()] for pick in (min, statistics.median))
    print(f'an exec takes {least[0]:.0f} us at least ({middle[0]:.0f} us median), preloaded {least[1]:.0f} us '
          f'({middle[1]:.0f} us); preloading costs {least[1] - least[0]:.0f} us')


def main():
    try:
        globals()[sys.argv[1]]()
    finally:
        shutil.rmtree(TMP)


main()
