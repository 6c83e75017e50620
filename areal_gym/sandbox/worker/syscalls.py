"""The system calls that a snippet's process may make, and their numbers.

All others are refused, including those of later kernels. Each word is a call with its numbers on
x86_64 and aarch64; a dash means that the machine does not have the call.
"""

from __future__ import annotations

COLUMNS = {"x86_64": 0, "aarch64": 1}


def _table(text: str) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each call; -1 if a machine does not have it."""
    rows = (word.split(":") for word in text.split())
    return {name: tuple(-1 if n == "-" else int(n) for n in numbers) for name, *numbers in rows}


FREE = _table(
    """
    read:0:63 write:1:64 close:3:57 close_range:436:436 lseek:8:62 pread64:17:67
    pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286
    pwritev2:328:287 creat:85:- access:21:- faccessat:269:48 faccessat2:439:439 stat:4:-
    lstat:6:- fstat:5:80 newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44
    readlink:89:- readlinkat:267:78 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49
    fchdir:81:50 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:-
    renameat:264:38 renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36
    mknod:133:- mknodat:259:33 ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83
    sync_file_range:277:84 fadvise64:221:223 readahead:187:213 copy_file_range:326:285
    umask:95:166 flock:73:32 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
    getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12
    flistxattr:196:13
    select:23:- pselect6:270:72 poll:7:- ppoll:271:73 epoll_create:213:- epoll_create1:291:20
    epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:-
    eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
    signalfd:282:- signalfd4:289:74 sendto:44:206 recvfrom:45:207 sendmsg:46:211
    recvmsg:47:212 sendmmsg:307:269 recvmmsg:299:243 shutdown:48:210 getsockname:51:204
    getpeername:52:205 getsockopt:55:209
    mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 madvise:28:233
    mincore:27:232 msync:26:227 mlock:149:228 munlock:150:229 mlock2:325:284 mlockall:151:230
    munlockall:152:231 membarrier:324:283 get_mempolicy:239:236 mseal:462:462
    pkey_alloc:330:289 pkey_free:331:290 pkey_mprotect:329:288 map_shadow_stack:453:453
    execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
    getpid:39:172 getppid:110:173 gettid:186:178 getpgid:121:155 setpgid:109:154 getpgrp:111:-
    setsid:112:157 getsid:124:156 getuid:102:174 getgid:104:176 geteuid:107:175
    getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 setuid:105:146
    setgid:106:144 setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149
    capget:125:90 arch_prctl:158:- set_tid_address:218:96 set_robust_list:273:99
    get_robust_list:274:100 rseq:334:293 restart_syscall:219:128 futex:202:98
    futex_waitv:449:449 futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456
    sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
    sched_getscheduler:145:120 sched_getattr:315:275 sched_get_priority_max:146:125
    sched_get_priority_min:147:126 sched_rr_get_interval:148:127 getpriority:140:141
    getcpu:309:168 ioprio_get:252:31 getrlimit:97:163 setrlimit:160:164 getrusage:98:165
    times:100:153 uname:63:160 sysinfo:99:179 getrandom:318:278 pidfd_open:434:434
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
    rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:- alarm:37:-
    setitimer:38:103 getitimer:36:102 nanosleep:35:101 clock_nanosleep:230:115
    clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:-
    """
)
"""Calls allowed with any arguments. Refused although harmless programs use them:

- memfd, System V shared memory, message queues, inotify, fanotify: memory without a limit;
- splice, tee, vmsplice, sendfile: they leave whole pages in a pipe, even after those were unmapped
  (shutil copies without them);
- timer_create: its signal may be SIGCONT, which would wake a stopped session;
- sync: it waits for all disks of the machine."""

METADATA = _table(
    """
    chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55
    lchown:94:- fchownat:260:54 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88
    """
)
"""Calls that change a file's mode, owner or times. Setting extended attributes is refused."""

PLACES = _table(
    """
    connect:42:203 accept:43:202 accept4:288:242 bind:49:200 listen:50:201
    setgroups:116:159 setfsuid:122:151 setfsgid:123:152 capset:126:91 seccomp:317:277
    timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
    timer_getoverrun:225:109 timer_delete:226:111
    setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15
    fremovexattr:199:16 inotify_init:253:- inotify_init1:294:26 inotify_add_watch:254:27
    inotify_rm_watch:255:28
    """
)
"""Calls that any program of a place may make besides: its network reaches only itself, and its
processes end with it."""

COUNTED = _table("memfd_create:319:279 sendfile:40:71 splice:275:76 tee:276:77 vmsplice:278:75")
"""Calls that hold memory which only a control group counts; for places that have one."""

GUARDED = _table(
    """
    clone:56:220 clone3:435:435 openat2:437:437 fork:57:- vfork:58:- open:2:- openat:257:56
    truncate:76:45 fcntl:72:25 ioctl:16:29 prctl:157:167 setsockopt:54:208 socketpair:53:199
    kill:62:129 tkill:200:130 tgkill:234:131 prlimit64:302:261 rt_sigqueueinfo:129:138
    rt_tgsigqueueinfo:297:240 pidfd_send_signal:424:424 sched_setaffinity:203:122 socket:41:198
    """
)
"""Calls with rules of their own: allowed with some arguments, or answered with ENOSYS."""

LAST = 469
"""The highest reviewed number. Higher calls are answered with ENOSYS rather than EPERM, so that a C
library that tries new calls first falls back to older ones."""
