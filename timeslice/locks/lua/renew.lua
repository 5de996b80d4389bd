--[[
Renews a lease; the first renewal confirms the grant. After data loss it puts the lease back.
ARGV  1 floor  2 lease id  3 token  4 job  5 host  6 pid  7 start  8 lease_ms  9 label
      10 'lock' if the lease is of a lock-only group, else 'served'
Reply ok deadline_ms counter pending_waiters | lost holder_job holder_token counter taken_by why
Events LeaseReinstalled, LeaseReclaimed, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local lease, token, job, lease_ms = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[8])

begin(true, FIELD_MAX)
check_number('token', token)
-- S.token is that of the last grant this server remembers: less than ours means that it forgot ours. What it takes for
-- the lease then is older, and had ended before ours was granted; only a swap that is newer than ours speaks against us,
-- or somebody who has seen a newer number. An agent that comes later than we do ends our lease by its fence.
local lost_here = S.token < token and S.swap_id < token and S.fence <= token
settle_clock()
if S.lease_id == lease and S.token == token and S.deadline_ms >= now then
  set('confirmed', '1')
  set('renewed_at_ms', now)
  set('deadline_ms', now + lease_ms)
  redis.call('DEL', grant_prefix .. lease)
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
return { 'ok', S.deadline_ms, S.counter, redis.call('ZCARD', queue_key) }
