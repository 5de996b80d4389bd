/* Who may be on the devices of one group: two jobs, two nodes. Written as one loop of guarded steps, each atomic as the
 * script or the look that it stands for; everything may happen between any two of them. See README.md.
 */
#ifndef TURNS_A /* holds of each job */
#define TURNS_A 2
#endif
#ifndef TURNS_B
#define TURNS_B 1
#endif
#ifndef CHANGES
#define CHANGES 1 /* of A's processes */
#endif
#ifndef DEATHS
#define DEATHS 1 /* of clients */
#endif
#ifndef CRASHES
#define CRASHES 1 /* of agents */
#endif
#define A 0
#define B 1
#define X(n, j) ((n) * 2 + (j))

/* What a node's agent told of a job, or the group presumes of it: locks/lua/include/residency.lua. */
#define OUT 0
#define IN 1
#define SAVED 2
#define UNKNOWN 3

/* What job A's processes are for an agent. B's are always plain. */
#define PLAIN 0
#define UNWATCHED 1 /* registers, and can't be watched: another user, another pid namespace, no descriptor left */
#define TITLED 2    /* its environment is gone (setproctitle): who has not proved it before can't now */
#define HIDDEN 3    /* never seen; it registers nowhere, or for a host name that no node has */

/* Clients */
#define IDLE 0
#define WAITS 1
#define INSIDE 2
#define DEAD 3

/* Truth */
byte kind;      /* of A's processes */
bit alive[4];   /* the job has processes on the node */
bit mem[4];     /* its state is on the devices */
bit saved[4];   /* its state is in host memory */
bit measures;   /* the devices can be measured */
bit excused[4]; /* came while nobody served the node, of a job that the group had forgotten when the node joined */
byte client[2];
byte turns[2];

/* Redis */
bit joined[2], heard[2];
byte member[4];
bit reg[4];   /* locks/lua/register.lua */
bit said[2];  /* the last holder has registered, each of its processes on a node of the group */
bit must_register[2];
bit was_in[2]; /* before a grant that is not confirmed yet */
byte lease, evict, swap; /* 0, or job + 1 */
bit confirmed;
bit done[2];  /* nodes that did their part of the swap */
bit covered[2]; /* nodes of the group when the lease was granted */

/* Agents */
bit up[2];
bit knows[4]; /* watches a living process of the job: in its journal */
bit ended[4]; /* watched all it knew of the job end: in its journal */
bit looking[2];
byte look[4];
bit fresh[4]; /* nothing was granted or moved since the look */

/* Faults left */
byte crashes, deaths, changes;

#ifdef DOOR /* instead of clients an llm-d controller or an operator has A put out: gateway/moves.py, locks/lua/evict.lua */
#define ASKED 1
#define ANSWERED 2
byte door;
#endif
#define NOBODY 2

/* of steps; 0 between them */
byte i_, k_, into_;
bit bad_;

#ifdef WAY7 /* two programs under one job id */
#define ID(j) 0
#else
#define ID(j) (j)
#endif
#define OTHER(j) (1 - (j))
#define HAS(j, s) (member[X(0, j)] == s || member[X(1, j)] == s)
#ifdef WAY0 /* absence of evidence is out: unknown keeps nobody away */
#define KEEPS_AWAY(j) HAS(j, IN)
#define DOUBTED(j) false
#else
#define KEEPS_AWAY(j) (HAS(j, IN) || HAS(j, UNKNOWN))
#define DOUBTED(j) HAS(j, UNKNOWN)
#endif
#define SERVED (joined[0] || joined[1])
#define HEARD ((!joined[0] || heard[0]) && (!joined[1] || heard[1]))
#define ALL_UP ((!joined[0] || up[0]) && (!joined[1] || up[1]))
#define FREE (lease == 0 && swap == 0)

/* An agent's word on a job: agent/look.py, agent/presence.py. It may say "out" of one that it does not watch only if it
 * watched all it knew of it end, or the job has said where it is, or the devices were measured free of it. */
#define PROVABLE(n, j) ((j) == B || kind == PLAIN)
#define MEASURED_FREE(n, j) (measures && !mem[X(n, j)] && !DOUBTFUL(n))
#define DOUBTFUL(n) (measures && ((mem[X(n, A)] && !knows[X(n, A)]) || (mem[X(n, B)] && !knows[X(n, B)])))
#define UNSEEN (kind == UNWATCHED || kind == HIDDEN)
#define WIPED(n) (kind == TITLED && alive[X(n, A)])
#ifdef WAY3 /* a registration that can't be watched is ignored */
#define CANT_WATCH(n, j) ((j) == A && reg[X(n, A)] && WIPED(n))
#elif defined(WAY4) /* one whose environment is gone is ignored */
#define CANT_WATCH(n, j) ((j) == A && reg[X(n, A)] && UNSEEN)
#else
#define CANT_WATCH(n, j) ((j) == A && reg[X(n, A)] && (UNSEEN || WIPED(n)))
#endif
#ifdef DOOR /* what a workload has on the devices without a hold, it alone can tell: it is asked in a step */
#define SHOWS false
#else
#define SHOWS true
#endif
#ifdef WAY0
#define VERDICT(n, j) (knows[X(n, j)] -> (mem[X(n, j)] -> IN : (saved[X(n, j)] -> SAVED : OUT)) : OUT)
#else
#define VERDICT(n, j) \
  (knows[X(n, j)] -> (mem[X(n, j)] && SHOWS -> IN : (saved[X(n, j)] -> SAVED : OUT)) : \
    (MEASURED_FREE(n, j) -> OUT : \
      (CANT_WATCH(n, j) || DOUBTFUL(n) || !(ended[X(n, j)] || said[j]) -> UNKNOWN : OUT)))
#endif
#define UNPROVED(n) ((alive[X(n, A)] && kind == PLAIN && !knows[X(n, A)]) || (alive[X(n, B)] && !knows[X(n, B)]))
#define NEWS(n, j) (VERDICT(n, j) != member[X(n, j)] && (member[X(n, j)] != OUT || knows[X(n, j)]) && lease != j + 1 && swap == 0)

/* locks/lua/include/advance.lua: decide */
#define MAY_GRANT(j) (FREE && client[j] == WAITS && SERVED && HEARD && evict == 0 && !KEEPS_AWAY(OTHER(ID(j))) \
  && !HAS(ID(j), SAVED) && (HAS(ID(j), IN) || HAS(ID(j), UNKNOWN) || ALL_UP))
#define MAY_SWAP(j) (FREE && client[j] == WAITS && SERVED && HEARD && ALL_UP && !DOUBTED(OTHER(ID(j))) \
  && !(evict == ID(j) + 1 && DOUBTED(ID(j))) \
  && (evict != 0 || KEEPS_AWAY(OTHER(ID(j))) || HAS(ID(j), SAVED)))

#ifdef LATE_LOOKS /* what was seen before a grant or a move is news after it */
#define STALE(n, j) skip
#else
#define STALE(n, j) fresh[X(n, j)] = 0; look[X(n, j)] = 0
#endif

/* locks/lua/include/lease.lua: grant. What was seen or said before is of an earlier turn. */
inline grant(j)
{
  lease = j + 1; confirmed = 0; was_in[j] = HAS(ID(j), IN) || HAS(ID(j), UNKNOWN);
  for (i_ : 0 .. 1) {
    covered[i_] = joined[i_];
    if
    :: joined[i_] && member[X(i_, ID(j))] != UNKNOWN -> member[X(i_, ID(j))] = IN
    :: else
    fi;
    STALE(i_, ID(j));
#ifndef OLD_ENDS
    ended[X(i_, ID(j))] = 0
#endif
  }
  i_ = 0;
#ifndef OLD_WORDS
  said[j] = 0
#endif
}
#ifdef OLD_WORDS /* a registration of an earlier life of the job is one */
#define EARLIER(j) said[j]
#else
#define EARLIER(j) false
#endif

/* The body, or a restore, touches the devices: the rule that everything here is for. */
inline touch(n, j)
{
  mem[X(n, j)] = 1;
  assert(!(covered[n] && mem[X(n, OTHER(j))] && !excused[X(n, OTHER(j))])) /* ONE JOB ON A DEVICE */
}

/* client/hold.py, client/identity.py: after its grant it registers what the group has not on record */
inline enter(j)
{
  client[j] = INSIDE; confirmed = 1; was_in[j] = 0;
  if
  :: must_register[j] ->
    said[j] = (j == B || kind != HIDDEN || EARLIER(j));
    for (i_ : 0 .. 1) {
      if
      :: alive[X(i_, j)] && joined[i_] && j == A && kind != HIDDEN -> reg[X(i_, j)] = 1
      :: alive[X(i_, j)] && !joined[i_] -> said[j] = 0 /* not_served: refused, or loud */
      :: else
      fi
    }
    i_ = 0
  :: else -> said[j] = 1 /* it was told that all is on record */
  fi
#ifdef WAY5 /* a registration for a node that nobody serves is one */
  ; said[j] = 1
#endif
}

/* agent/heartbeat.py: join; locks/lua/heartbeat.lua. Who is granted, or is not known to be out, is presumed to be here. */
#ifdef SAVED_IS_OUT
#define PRESUMED(j) (lease == j + 1 || HAS(j, IN) || HAS(j, UNKNOWN))
#else
#define PRESUMED(j) (lease == j + 1 || HAS(j, IN) || HAS(j, UNKNOWN) || HAS(j, SAVED))
#endif
inline start(n)
{
  up[n] = 1; looking[n] = 0;
  if
  :: !joined[n] ->
    joined[n] = 1;
    for (i_ : 0 .. 1) {
      if
      :: PRESUMED(i_) -> member[X(n, i_)] = IN
      :: else -> excused[X(n, i_)] = mem[X(n, i_)] && !HAS(i_, SAVED)
      fi
    }
    i_ = 0;
    swap = 0; done[0] = 0; done[1] = 0 /* coordinator/swap.py: it joined while the swap was under way */
  :: else
  fi;
  heard[n] = 0 /* "first": it tells all that it sees */
}

#ifdef WAY6 /* its start time differs by the offset of its namespace: it is taken for dead */
#define PROVED knows[X(n, A)] = 0; ended[X(n, A)] = 1
#else
#define PROVED knows[X(n, A)] = 1
#endif
/* agent/targets.py, agent/discovery/: before each look and step */
inline refresh(n)
{
  if
  :: alive[X(n, A)] && kind == PLAIN -> PROVED
  :: else
  fi;
  knows[X(n, B)] = alive[X(n, B)]
}

/* agent/steps.py on one node: who has to leave goes, and then who was saved comes back. */
#define LEAVES(n, k) ((swap == NOBODY + 1 -> evict == k + 1 : k != into_) \
  && (member[X(n, k)] == IN || member[X(n, k)] == UNKNOWN || (knows[X(n, k)] && mem[X(n, k)])))
inline step(n)
{
  refresh(n);
  bad_ = 0; into_ = (swap == NOBODY + 1 || evict == ID(swap - 1) + 1 -> NOBODY : ID(swap - 1));
  for (k_ : 0 .. 1) {
    if
    :: LEAVES(n, k_) ->
      STALE(n, k_);
      if
      :: knows[X(n, k_)] ->
        saved[X(n, k_)] = saved[X(n, k_)] || mem[X(n, k_)]; mem[X(n, k_)] = 0; excused[X(n, k_)] = 0;
        member[X(n, k_)] = (saved[X(n, k_)] -> SAVED : OUT)
      :: else ->
        member[X(n, k_)] = VERDICT(n, k_);
        bad_ = bad_ || member[X(n, k_)] == UNKNOWN
      fi
    :: else
    fi
  }
  k_ = 0;
  if
  :: bad_ -> swap = 0; done[0] = 0; done[1] = 0; bad_ = 0 /* refused: its waiter is put off */
  :: else ->
    if
    :: into_ != NOBODY && saved[X(n, into_)] ->
      saved[X(n, into_)] = 0; member[X(n, into_)] = IN; STALE(n, into_);
      covered[n] = 1;
      touch(n, into_)
    :: else
    fi;
    done[n] = 1
  fi;
  into_ = 0
}

#ifdef DOOR
#define HELD(n) (joined[n] && mem[X(n, A)] && !excused[X(n, A)])
inline answer()
{
  if
  :: door == ASKED -> printf("the controller is told that A is out\n"); door = ANSWERED; assert(!HELD(0) && !HELD(1)) /* OUT MEANS OUT */
  :: else
  fi
}
#else
inline answer()
{
  skip
}
#endif

/* locks/lua/promote.lua */
inline promote()
{
  if
  :: evict == A + 1 -> answer()
  :: else
  fi;
  k_ = swap - 1; swap = 0; done[0] = 0; done[1] = 0; evict = 0;
  if
  :: k_ != NOBODY && client[k_] == WAITS && !HAS(ID(k_), SAVED) -> grant(k_)
  :: else
  fi;
  k_ = 0
}

/* locks/lua/report.lua: news that were overtaken by a grant or a step are left out, and looked for again. */
inline report(n)
{
  for (i_ : 0 .. 1) {
    if
    :: fresh[X(n, i_)] && lease != i_ + 1 && swap == 0 ->
      if
      :: look[X(n, i_)] == OUT && member[X(n, i_)] != OUT && !knows[X(n, i_)] ->
        ended[X(n, i_)] = 0; reg[X(n, i_)] = 0
      :: else
      fi;
      if
      :: member[X(n, i_)] != OUT || look[X(n, i_)] != UNKNOWN -> member[X(n, i_)] = look[X(n, i_)]
      :: else /* unknown is said only of a job that the group tells here */
      fi
    :: else
    fi;
    look[X(n, i_)] = 0; fresh[X(n, i_)] = 0
  }
  i_ = 0; looking[n] = 0; heard[n] = 1
}

inline end_process(n, j)
{
  alive[X(n, j)] = 0; mem[X(n, j)] = 0; saved[X(n, j)] = 0; excused[X(n, j)] = 0;
  if
  :: knows[X(n, j)] -> knows[X(n, j)] = 0; ended[X(n, j)] = 1 /* pidfd: agent/targets.py */
  :: else
  fi
}

#define OVER(j) (client[j] == DEAD || (client[j] == IDLE && turns[j] == 0))

#define CLIENT(j) \
  :: d_step { client[j] == IDLE && turns[j] > 0 -> printf("%c asks\n", 65 + j); client[j] = WAITS; MUST(j) } \
  :: d_step { client[j] == WAITS && lease == j + 1 -> printf("%c confirms and is inside\n", 65 + j); enter(j) } /* locks/lua/renew.lua */ \
  :: d_step { client[j] == INSIDE && (alive[X(0, j)] && !mem[X(0, j)] || alive[X(1, j)] && !mem[X(1, j)]) -> printf("%c loads\n", 65 + j); \
    if :: alive[X(0, j)] -> touch(0, j) :: else fi; \
    if :: alive[X(1, j)] -> touch(1, j) :: else fi } \
  :: d_step { client[j] == INSIDE -> printf("%c yields\n", 65 + j); client[j] = IDLE; turns[j]--; UNLEASE(j) } /* yield.lua: the state stays */ \
  :: d_step { client[j] == INSIDE && RELEASED(j) -> printf("%c yields and says that it is out\n", 65 + j); /* its own word under its token, after all of it is free */ \
    client[j] = IDLE; turns[j]--; UNLEASE(j); member[X(0, ID(j))] = OUT; member[X(1, ID(j))] = OUT } \
  :: d_step { client[j] != DEAD && deaths > 0 -> printf("%c: its client dies\n", 65 + j); client[j] = DEAD; turns[j] = 0; deaths-- } \
  :: d_step { lease == j + 1 && client[j] == DEAD -> printf("%c: its lease is reclaimed\n", 65 + j); /* locks/lua/include/lease.lua: reclaim */ \
    if \
    :: confirmed -> evict = ID(j) + 1 \
    :: else -> \
      if \
      :: !was_in[j] -> /* as before: no body ran */ \
        member[X(0, ID(j))] = OUT; member[X(1, ID(j))] = OUT; \
        excused[X(0, j)] = mem[X(0, j)]; excused[X(1, j)] = mem[X(1, j)] \
      :: else \
      fi \
    fi; \
    UNLEASE(j) } \
  :: d_step { OVER(j) && alive[X(0, j)] -> printf("%c: its process on node 0 ends\n", 65 + j); end_process(0, j) } \
  :: d_step { OVER(j) && alive[X(1, j)] -> printf("%c: its process on node 1 ends\n", 65 + j); end_process(1, j) } \
  :: d_step { MAY_GRANT(j) -> printf("%c is granted\n", 65 + j); grant(j) } \
  :: d_step { MAY_SWAP(j) -> printf("a swap for %c\n", 65 + j); swap = j + 1 }

#define UNLEASE(j) lease = 0; confirmed = 0; was_in[j] = 0; covered[0] = 0; covered[1] = 0; END_LOOKS(j)
#ifdef ENDS_KEEP_LOOKS /* what was seen during a turn is news after it */
#define END_LOOKS(j) skip
#else
#define END_LOOKS(j) STALE(0, ID(j)); STALE(1, ID(j))
#endif
#ifdef WAY2 /* whether it has to register is decided when it asks: a group that nobody serves yet says no */
#define MUST(j) must_register[j] = SERVED
#else
#define MUST(j) must_register[j] = 1
#endif
#ifdef WAY9 /* it says so while some of its processes still use it */
#define RELEASED(j) true
#else
#define RELEASED(j) (!mem[X(0, j)] && !mem[X(1, j)])
#endif

#ifdef SLOW_LOOKS /* anything may happen between a look and its report */
#define REPORTS_AT_ONCE(n) skip
#else
#define REPORTS_AT_ONCE(n) printf("agent %d reports\n", n); report(n)
#endif
#define LOOK(n, j) \
  if \
  :: VERDICT(n, j) != member[X(n, j)] || ended[X(n, j)] -> look[X(n, j)] = VERDICT(n, j); fresh[X(n, j)] = 1 \
  :: else \
  fi
#define AGENT(n) \
  :: d_step { !up[n] -> printf("agent %d starts\n", n); start(n) } \
  :: d_step { up[n] && crashes > 0 -> printf("agent %d dies\n", n); crashes--; up[n] = 0; looking[n] = 0; \
    fresh[X(n, A)] = 0; look[X(n, A)] = 0; fresh[X(n, B)] = 0; look[X(n, B)] = 0 } \
  :: d_step { up[n] && !looking[n] && swap == 0 && (!heard[n] || UNPROVED(n) || NEWS(n, A) || NEWS(n, B)) -> printf("agent %d looks\n", n); \
    refresh(n); looking[n] = 1; \
    LOOK(n, A); \
    LOOK(n, B); \
    REPORTS_AT_ONCE(n) } \
  :: d_step { up[n] && looking[n] -> printf("agent %d reports\n", n); report(n) } \
  :: d_step { up[n] && joined[n] && swap != 0 && !done[n] -> printf("agent %d does its step\n", n); step(n) }


/* timeslice repair GROUP --out JOB: asked, an operator looks, and says so if it is true. locks/lua/repair.lua */
#define OPERATOR(j) \
  :: d_step { FREE && HAS(j, UNKNOWN) && !mem[X(0, j)] && !mem[X(1, j)] && (client[A] == WAITS || client[B] == WAITS) -> \
    printf("an operator says that %c is out\n", 65 + j); \
    if :: member[X(0, j)] == UNKNOWN -> member[X(0, j)] = OUT :: else fi; \
    if :: member[X(1, j)] == UNKNOWN -> member[X(1, j)] = OUT :: else fi; \
    reg[X(0, j)] = 0; reg[X(1, j)] = 0; STALE(0, j); STALE(1, j) }

inline replace(n, to)
{
  printf("A: its process on node %d ends, and one of kind %d comes\n", n, to);
  changes--; kind = to;
  end_process(n, A); alive[X(n, A)] = 1
}

init {
  d_step { turns[A] = TURNS_A; turns[B] = TURNS_B; crashes = CRASHES; deaths = DEATHS; changes = CHANGES;
    alive[X(0, A)] = 1; alive[X(0, B)] = 1; alive[X(1, B)] = 1 }
  if :: alive[X(1, A)] = 1 :: skip fi;
  if :: measures = 1 :: skip fi;
  if :: kind = PLAIN :: kind = UNWATCHED :: kind = TITLED :: kind = HIDDEN fi;
#ifdef DOOR
  mem[X(0, A)] = 1; mem[X(1, A)] = alive[X(1, A)]; /* loaded without a hold, and nobody will hold */
  turns[A] = 0; turns[B] = 0;
#endif
  do
  CLIENT(A)
  CLIENT(B)
  AGENT(0)
  AGENT(1)
  :: d_step { swap != 0 && (!joined[0] || done[0]) && (!joined[1] || done[1]) -> printf("the swap is promoted\n"); promote() }
  OPERATOR(A)
  OPERATOR(B)
  /* a process takes a title; ends, and another one of the job comes; moves to the other node */
  :: d_step { changes > 0 && kind == PLAIN -> printf("A takes a title\n"); changes--; kind = TITLED }
  :: d_step { changes > 0 && client[A] == IDLE && alive[X(0, A)] -> replace(0, PLAIN) }
  :: d_step { changes > 0 && client[A] == IDLE && alive[X(0, A)] -> replace(0, HIDDEN) }
  :: d_step { changes > 0 && client[A] == IDLE && alive[X(0, A)] -> replace(0, UNWATCHED) }
  :: d_step { changes > 0 && client[A] == IDLE && alive[X(0, A)] && !alive[X(1, A)] ->
    printf("A moves to node 1\n"); changes--; end_process(0, A); alive[X(1, A)] = 1 }
#ifdef WAY4
  :: d_step { kind == TITLED && knows[X(0, A)] -> knows[X(0, A)] = 0 }
  :: d_step { kind == TITLED && knows[X(1, A)] -> knows[X(1, A)] = 0 }
#endif
#ifdef WAY10 /* a look ends the process that it asks; what its children hold is taken for ended with it */
  :: d_step { up[0] && knows[X(0, A)] && lease == 0 && swap == 0 -> printf("agent 0 asks A, which ends of it\n");
    knows[X(0, A)] = 0; ended[X(0, A)] = 1; kind = HIDDEN; reg[X(0, A)] = 0 }
#endif
#ifdef DOOR
  :: d_step { door == 0 && FREE && evict == 0 && SERVED && HEARD && ALL_UP && !DOUBTED(A) && !DOUBTED(B) ->
    printf("a controller wants A out\n"); door = ASKED; evict = A + 1; swap = NOBODY + 1 }
#ifdef WAY8 /* who was never granted is said to be out unasked */
  :: d_step { door == ASKED && !HAS(A, IN) && !HAS(A, SAVED) && !HAS(A, UNKNOWN) -> evict = 0; swap = 0; done[0] = 0; done[1] = 0; answer() }
#endif
  :: d_step { door == ASKED && FREE && evict == A + 1 && DOUBTED(A) -> /* dropped: locks/lua/settle.lua, 'once' */
    printf("the controller is told that A could not be moved\n"); evict = 0; door = ANSWERED }
  :: d_step { door == ASKED && FREE && evict == A + 1 && SERVED && HEARD && ALL_UP && !DOUBTED(A) -> swap = NOBODY + 1 }
#endif
  :: else -> break
  od;
  assert(OVER(A) && OVER(B)); /* IT GOES ON */
#ifdef DOOR
  assert(door == ANSWERED) /* IT GOES ON */
#endif
}
