--[[
Renews a lease; the first renewal confirms the grant. After data loss it puts the lease back. Each rank of a gang renews
for itself: the lease lasts as long as none of them is silent.
ARGV  1 floor  2 lease id  3 token  4 job  5 host  6 pid  7 start  8 lease_ms  9 label
      10 'lock' if the lease is of a lock-only group, else 'served'  11 rank, or '' if it is no gang's  12 how many ranks
Reply ok deadline_ms counter pending_waiters unconfirmed (ranks without which no body begins)
      registered (0: the agent of this node does not know this process)
      lost holder_job holder_token counter taken_by why
Events LeaseReinstalled, LeaseReclaimed, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local lease, token, job, lease_ms = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[8])
local rank, world = ARGV[11], ARGV[12]

-- The record of the rank that renews a lease which stands, or nil: it is not inside. After data loss it tells who it is.
local function party_inside()
  local party = party_get(lease, rank)
  if party and party.id == UNKNOWN then
    party.host, party.pid, party.start = ARGV[5], ARGV[6], ARGV[7]
  end
  return party and party.renewed ~= 'left' and party
end

-- The ranks are not all known any more. Each has a term to come back; one that had left before can't, and ends it.
local function put_back_ranks()
  set('gang', world)
  gang_formed(lease, redis.call('HGET', waiters_key, lease .. '/name') or '', job, world)
  waiter_remove(lease) -- others of its ranks may have asked anew
  for other = 0, tonumber(world) - 1 do
    if not party_get(lease, other) then
      party_set(lease, other, { id = UNKNOWN, host = '-', pid = '-', start = '-', renewed = '-' })
    end
    redis.call('ZADD', alive_key, now + lease_ms, lease .. '/' .. other)
  end
  redis.call('HSET', waiters_key, lease .. '/confirmed', world) -- bodies have run
  party_renew(lease, rank, party_inside())
end

begin(true, FIELD_MAX)
if rank ~= '' and not is_rank(rank, world) then
  return redis.error_reply('ERR a rank is a number from 0 to below the number of ranks')
end
check_number('token', token)
-- S.token is that of the last grant this server remembers: less than ours means that it forgot ours. What it takes for
-- the lease then is older, and had ended before ours was granted; only a swap that is newer than ours speaks against us,
-- or somebody who has seen a newer number. An agent that comes later than we do ends our lease by its fence.
local lost_here = S.token < token and S.swap_id < token and S.fence <= token
settle_clock()
if rank ~= '' then
  reap() -- a rank that died meanwhile ends it for this one, too
end
local ended = rank ~= '' and hear_end(lease, rank)
if ended then
  advance()
  save()
  return { 'lost', S.job, S.token, S.counter, '', ended }
end
local held = S.lease_id == lease and S.token == token and S.deadline_ms >= now
local party = held and rank ~= '' and party_inside()
if held and S.gang == world and (rank == '' or party) then
  set('confirmed', '1')
  set('renewed_at_ms', now)
  set('deadline_ms', now + lease_ms)
  if party then
    party_renew(lease, rank, party)
  else
    redis.call('DEL', grant_prefix .. lease)
  end
elseif lost_here and not has_ended(lease) then
  if S.lease_id ~= '' then
    remember_ended(S.lease_id)
    end_lease('LeaseReclaimed', 'why', 'the server had forgotten that it ended')
  end
  if S.swap_id ~= 0 then
    clear_swap()
  end
  set('mode', ARGV[10])
  set('lease_id', lease)
  set('job', job)
  set('host', ARGV[5])
  set('pid', ARGV[6])
  set('start', ARGV[7])
  set('label', ARGV[9])
  set('token', token)
  set('counter', math.max(S.counter, token))
  set('lease_ms', lease_ms)
  set('granted_at_ms', now)
  set('renewed_at_ms', now)
  set('confirmed', '1')
  set('how', 'no-op')
  set('deadline_ms', now + lease_ms)
  if rank ~= '' then
    put_back_ranks()
  end
  if S.mode == 'served' then
    redis.call('HSET', jobs_key, job .. '/residency', 'resident', job .. '/token', digits(token))
    job_loads_everywhere(job)
  end
  set_phase('held', '')
  emit('LeaseReinstalled', 'job', job, 'waiter', lease, 'token', digits(token))
else
  reap()
  advance()
  save()
  local by, why = taken_by(lease)
  return { 'lost', S.job, S.token, S.counter, by, why }
end
save()
local pending = pause_reason() == '' and redis.call('ZCARD', queue_key) or 0 -- in a paused group nobody could follow
local unconfirmed = rank == '' and 0 or ranks_unconfirmed(lease)
return { 'ok', S.deadline_ms, S.counter, pending, unconfirmed, is_known_there(job, ARGV[5], ARGV[6], ARGV[7]) }
