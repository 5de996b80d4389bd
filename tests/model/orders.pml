/* One swap on two nodes, A out and B in: orders, streams, journals, owners. One loop of guarded steps; agents die between
 * any two of theirs, streams lose what they hold, folders are lost, another coordinator takes over. See README.md.
 */
#ifndef DEATHS
#define DEATHS 1 /* of agents */
#endif
#ifndef LOST_STREAMS
#define LOST_STREAMS 1
#endif
#ifndef LOST_FOLDERS
#define LOST_FOLDERS 1
#endif
#ifndef FAULTS
#define FAULTS 1 /* commits that fail, and steps that are given up because their time is over */
#endif
#ifndef OWNERS
#define OWNERS 1 /* changes of owner */
#endif

/* Steps of a swap: coordinator/swap.py */
#define PREPARE 1
#define COMMIT 2
#define ROLLBACK 3
#define PROMOTED 4
#define SETTLED 5

/* Of a node, as the group knows it: locks/lua/accepted.lua, ack.lua */
#define NONE 0
#define BEGUN 0 /* + step: 1, 2, 3 */
#define PREPARED 4
#define DONE 5
#define FAILED 6
#define UNDONE 7

byte step = PREPARE, owner;
byte at[2], command[2]; /* the step, and the id of the order that the node began last */
byte stream[2];         /* a bit an order */
bit sent[2];            /* the owner's memory: of the current step */

#define ORDER(s, epoch) ((s) + 4 * (epoch))
#define STEP_OF(id) ((id) & 3)
#define EPOCH_OF(id) ((id) >> 2)
#define IN_STREAM(n, id) (stream[n] & (1 << (id)))

/* Agents */
bit up[2] = 1;
byte hand[2];           /* the order that is carried out, or 0 */
bit begun[2];           /* it was accepted */
byte answered[2], answer[2]; /* the journal: the last order that was answered, and how */

/* Truth: is it on the devices of the node? else it is in host memory */
bit a[2] = 1, b[2], locked[2];

byte deaths = DEATHS, streams = LOST_STREAMS, folders = LOST_FOLDERS, faults = FAULTS, owners = OWNERS;

#define FINAL(n) (at[n] == FAILED || at[n] == UNDONE)
#define IS_BEGUN(n) (at[n] == BEGUN + step)
#define MISSING(n) (step == PREPARE && at[n] == NONE || step == COMMIT && at[n] == PREPARED || \
  step == ROLLBACK && at[n] != NONE && !FINAL(n) && !IS_BEGUN(n))
/* coordinator/swap.py command_id: what is begun keeps its id, whoever owns the group by then */
#define ID(n) (IS_BEGUN(n) -> command[n] : ORDER(step, owner))
#ifdef WAY11 /* a begun step is not ordered again */
#define DUE(n) (MISSING(n) && !sent[n] || step == ROLLBACK && IS_BEGUN(n) && !sent[n])
#else
#define DUE(n) ((MISSING(n) || IS_BEGUN(n)) && (!sent[n] || up[n] && !IN_STREAM(n, ID(n))))
#endif

/* locks/lua/step.lua */
inline move(to)
{
  step = to; sent[0] = 0; sent[1] = 0
}

/* agent/reader.py, locks/lua/accepted.lua: an order that was answered is answered again; one that does not stand is dropped */
#define MAY_BEGIN(n) (STEP_OF(hand[n]) == step && (command[n] == hand[n] || EPOCH_OF(hand[n]) == owner))
inline drop(n)
{
  stream[n] = stream[n] & ~(1 << hand[n]); hand[n] = 0; begun[n] = 0
}

/* agent/executor.py: the journal first, then the group */
inline answers(n, how)
{
  answered[n] = hand[n]; answer[n] = how
}

inline comes_in(n, x)
{
  x[n] = 1;
  assert(!(a[n] && b[n])) /* ONE JOB ON A DEVICE */
}
#define WORKS(n, s) (up[n] && begun[n] && STEP_OF(hand[n]) == s && answered[n] != hand[n])

#define RUNS (step < PROMOTED)
#define NODE(n) \
  :: d_step { RUNS && DUE(n) -> printf("order %d to node %d\n", ID(n), n); \
    stream[n] = stream[n] | (1 << ID(n)); sent[n] = 1 } \
  :: d_step { RUNS && up[n] && hand[n] == 0 && IN_STREAM(n, ORDER(PREPARE, 0)) -> hand[n] = ORDER(PREPARE, 0) } \
  :: d_step { RUNS && up[n] && hand[n] == 0 && IN_STREAM(n, ORDER(PREPARE, 1)) -> hand[n] = ORDER(PREPARE, 1) } \
  :: d_step { RUNS && up[n] && hand[n] == 0 && IN_STREAM(n, ORDER(COMMIT, 0)) -> hand[n] = ORDER(COMMIT, 0) } \
  :: d_step { RUNS && up[n] && hand[n] == 0 && IN_STREAM(n, ORDER(COMMIT, 1)) -> hand[n] = ORDER(COMMIT, 1) } \
  :: d_step { RUNS && up[n] && hand[n] == 0 && IN_STREAM(n, ORDER(ROLLBACK, 0)) -> hand[n] = ORDER(ROLLBACK, 0) } \
  :: d_step { RUNS && up[n] && hand[n] == 0 && IN_STREAM(n, ORDER(ROLLBACK, 1)) -> hand[n] = ORDER(ROLLBACK, 1) } \
  :: d_step { RUNS && up[n] && hand[n] != 0 && !begun[n] && answered[n] != hand[n] -> \
    if \
    :: MAY_BEGIN(n) -> printf("node %d begins %d\n", n, hand[n]); \
      begun[n] = 1; command[n] = hand[n]; at[n] = BEGUN + step \
    :: else -> printf("node %d drops %d\n", n, hand[n]); drop(n) \
    fi } \
  :: d_step { RUNS && WORKS(n, PREPARE) -> locked[n] = a[n]; answers(n, PREPARED) } \
  :: d_step { RUNS && WORKS(n, COMMIT) && a[n] -> a[n] = 0; locked[n] = 0 } \
  :: d_step { RUNS && WORKS(n, COMMIT) && !a[n] && !b[n] -> comes_in(n, b) } \
  :: d_step { RUNS && WORKS(n, COMMIT) && b[n] -> answers(n, DONE) } \
  :: d_step { RUNS && WORKS(n, COMMIT) && faults > 0 -> printf("node %d fails\n", n); faults--; \
    b[n] = 0; a[n] = 1; locked[n] = 0; answers(n, FAILED) } \
  :: d_step { RUNS && WORKS(n, ROLLBACK) && b[n] -> b[n] = 0 } \
  :: d_step { RUNS && WORKS(n, ROLLBACK) && !b[n] && !a[n] -> comes_in(n, a) } \
  :: d_step { RUNS && WORKS(n, ROLLBACK) && a[n] -> locked[n] = 0; answers(n, UNDONE) } \
  :: d_step { RUNS && up[n] && hand[n] != 0 && answered[n] == hand[n] -> /* locks/lua/ack.lua */ \
    printf("node %d answers %d with %d\n", n, hand[n], answer[n]); \
    if \
    :: command[n] == hand[n] && at[n] >= 1 && at[n] <= 3 -> at[n] = answer[n] \
    :: else \
    fi; \
    drop(n) } \
  :: d_step { RUNS && up[n] && deaths > 0 -> printf("agent %d dies\n", n); deaths--; up[n] = 0; hand[n] = 0; begun[n] = 0 } \
  :: d_step { RUNS && !up[n] -> up[n] = 1 } \
  :: d_step { RUNS && stream[n] && streams > 0 -> printf("stream %d is lost\n", n); streams--; stream[n] = 0 } \
  :: d_step { RUNS && !up[n] && answered[n] && folders > 0 -> printf("folder %d is lost\n", n); folders--; answered[n] = 0; answer[n] = 0 }

init {
  do
  NODE(0)
  NODE(1)
  :: d_step { owners > 0 && RUNS -> printf("another owner\n"); owners--; owner = 1; sent[0] = 0; sent[1] = 0 }
  :: d_step { step == PREPARE && at[0] == PREPARED && at[1] == PREPARED -> printf("commit\n"); move(COMMIT) }
  :: d_step { step == COMMIT && at[0] == DONE && at[1] == DONE -> printf("promoted\n"); step = PROMOTED; /* promote.lua */
    assert(!a[0] && !a[1] && b[0] && b[1]) /* OUT MEANS OUT */ }
  /* coordinator/swap.py undo: it failed on a node, or its time is over */
  :: d_step { (step == PREPARE || step == COMMIT) && (at[0] == FAILED || at[1] == FAILED) -> printf("rollback\n"); move(ROLLBACK) }
  :: d_step { faults > 0 && (step == PREPARE || step == COMMIT && (MISSING(0) || MISSING(1))) -> printf("too late\n");
    faults--; move(ROLLBACK) }
  :: d_step { step == ROLLBACK && (at[0] == NONE || FINAL(0)) && (at[1] == NONE || FINAL(1)) -> printf("settled\n");
    step = SETTLED; /* settle.lua */
    assert(a[0] && a[1] && !b[0] && !b[1] && !locked[0] && !locked[1]) /* NOTHING IS LOST */ }
  :: else -> break
  od;
  assert(step >= PROMOTED) /* IT GOES ON */
}
