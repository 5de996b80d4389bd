/* Holds of two groups: two jobs, leases that end at any moment, clients that die between any two steps. One loop of guarded
 * steps, each atomic as the script that it stands for. See README.md.
 */
#ifndef LOSSES
#define LOSSES 3 /* revokes, leases past their term, and dead clients */
#endif
#ifndef TURNS
#define TURNS 2 /* holds of each job */
#endif
#define A 0
#define B 1
#define X(g, j) ((g) * 2 + (j))

/* What a client does */
#define IDLE 0
#define WAITS_FIRST 1
#define WAITS_SECOND 2
#define ENTERS 3 /* it has its last grant */
#define INSIDE 4
#define DEAD 5

byte does[2], turns[2], losses;
byte holder[2]; /* of each group: 0, or job + 1 */
bit inside[4];  /* X(g, j): the body of j uses the devices of g */
bit evict[4];   /* j was inside g when its lease ended; its state is not proved out yet */

#define HAS(g, j) (holder[g] == (j) + 1)
/* locks/lua/include/lease.lua, advance.lua: nobody beside a holder, and nobody before a lost holder's state is out */
#define FREE(g) (holder[g] == 0 && !evict[X(g, A)] && !evict[X(g, B)])

/* client/hold.py in_order: groups are taken in one order everywhere */
#ifdef CROSSED
#define FIRST(j) (j)
#else
#define FIRST(j) 0
#endif
#define SECOND(j) (1 - FIRST(j))

/* client/hold.py, cli/hold.py: every entry into a body asks for all leases after the last grant. */
#ifdef WAY1 /* the last grant is enough */
#define MAY_ENTER(j) true
#else
#define MAY_ENTER(j) (HAS(0, j) && HAS(1, j))
#endif

/* One that is lost: all are given back, and waited for again in order. */
inline give_back(j)
{
#ifdef KEPT /* what is left is kept, and the lost one waited for beside it */
  does[j] = (HAS(FIRST(j), j) -> WAITS_SECOND : WAITS_FIRST)
#else
  if :: HAS(0, j) -> holder[0] = 0 :: else fi;
  if :: HAS(1, j) -> holder[1] = 0 :: else fi;
  does[j] = WAITS_FIRST
#endif
}

inline enter(j)
{
  does[j] = INSIDE; inside[X(0, j)] = 1; inside[X(1, j)] = 1;
  assert(HAS(0, j) && HAS(1, j)); /* NO BODY WITHOUT ITS LEASES */
  assert(!inside[X(0, 1 - j)] && !inside[X(1, 1 - j)]) /* ONE JOB IN A GROUP */
}

#define CLIENT(j) \
  :: d_step { does[j] == IDLE && turns[j] > 0 -> printf("%c asks\n", 65 + j); does[j] = WAITS_FIRST } \
  :: d_step { does[j] == WAITS_FIRST && FREE(FIRST(j)) -> printf("%c has the first\n", 65 + j); \
    holder[FIRST(j)] = j + 1; does[j] = (HAS(SECOND(j), j) -> ENTERS : WAITS_SECOND) } \
  :: d_step { does[j] == WAITS_SECOND && FREE(SECOND(j)) -> printf("%c has the second\n", 65 + j); \
    holder[SECOND(j)] = j + 1; does[j] = ENTERS } \
  :: d_step { does[j] == ENTERS && MAY_ENTER(j) -> printf("%c is inside\n", 65 + j); \
    enter(j) } \
  :: d_step { does[j] == ENTERS && !MAY_ENTER(j) -> printf("%c gives back\n", 65 + j); give_back(j) } \
  :: d_step { does[j] == INSIDE -> printf("%c leaves\n", 65 + j); does[j] = IDLE; turns[j]--; \
    if :: HAS(0, j) -> holder[0] = 0 :: else fi; \
    if :: HAS(1, j) -> holder[1] = 0 :: else fi; \
    inside[X(0, j)] = 0; inside[X(1, j)] = 0; evict[X(0, j)] = 0; evict[X(1, j)] = 0 } \
  :: d_step { does[j] != DEAD && losses > 0 -> printf("%c dies\n", 65 + j); does[j] = DEAD; losses--; turns[j] = 0 } \
  LEASE(0, j) \
  LEASE(1, j)

#define LEASE(g, j) \
  /* locks/lua/include/lease.lua: reclaim; locks/lua/revoke.lua */ \
  :: d_step { HAS(g, j) && (losses > 0 || does[j] == DEAD) -> printf("%c loses group %d\n", 65 + j, g); \
    losses = (does[j] == DEAD -> losses : losses - 1); holder[g] = 0; evict[X(g, j)] = inside[X(g, j)] } \
  /* agent/: its state is moved out, or its processes end */ \
  :: d_step { evict[X(g, j)] -> printf("%c is out of group %d\n", 65 + j, g); evict[X(g, j)] = 0; inside[X(g, j)] = 0 } \
  :: d_step { does[j] == DEAD && inside[X(g, j)] -> inside[X(g, j)] = 0; evict[X(g, j)] = 0 }

#define OVER(j) (does[j] == DEAD || (does[j] == IDLE && turns[j] == 0))

init {
  d_step { losses = LOSSES; turns[A] = TURNS; turns[B] = TURNS }
  do
  CLIENT(A)
  CLIENT(B)
  :: else -> break
  od;
  assert(OVER(A) && OVER(B)) /* IT GOES ON */
}
