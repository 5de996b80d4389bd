--[[
An agent tells what it sees outside of a swap: residency after a probe, and processes that ended.
ARGV  1 floor  2 node  3 seen: the counter it knew before it looked
      4 '1': this is all that is on its devices; '0': only what the group did not know  5 number of jobs
      then per job: job state bytes(host) device_bytes backend unheld (1: on the device without a hold)
      why (of a state `unknown`: why nobody can see it)
      then per process that ended: job pid start
Reply ok counter ignored (jobs whose news came at a bad time: report them again)
      no_member (nothing was noted: join by a heartbeat, then report)
Events JobGone, JobUnheld, JobUnknown, LeaseReclaimed, WaiterReaped, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local OUT_OF_PLACE = { resident = true, faulted = true } -- never too late to say
local node, seen, whole, count = ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1', tonumber(ARGV[5])

begin(true)
if not redis.call('ZSCORE', nodes_key, node) then
  return { 'no_member' } -- what it leaves here, nobody would ever count or remove
end
settle_clock()
if whole then -- news alone were told to another server, should this one be its replica
  hear(node)
end
local ignored = 0
for n = 0, count - 1 do
  local i = 6 + n * 7
  local job, state, at = ARGV[i], ARGV[i + 1], node .. '/' .. ARGV[i] .. '/'
  local record = redis.call('HMGET', jobs_key, job .. '/token', job .. '/residency', job .. '/moved')
  local before = redis.call('HMGET', members_key, at .. 'state', at .. 'unheld')
  -- A swap moved it after the look. Or it was granted after the look, and may have loaded since. A job that is being
  -- swapped is told of by the steps of its swap.
  local moved = (tonumber(record[3]) or 0) > seen
  local stale = (tonumber(record[1]) or 0) > seen or (S.lease_id ~= '' and S.job == job)
    or (S.swap_id ~= 0 and (S.swap_job == job or not OUT[record[2] or '']))
  local out = state == 'gone' or state == 'absent'
  if moved or (stale and not OUT_OF_PLACE[state]) then
    ignored = ignored + 1
  else
    if out then
      member_forget(at)
    else
      redis.call('HSET', members_key, at .. 'state', state, at .. 'bytes', ARGV[i + 2], at .. 'device_bytes', ARGV[i + 3],
        at .. 'backend', ARGV[i + 4], at .. 'unheld', ARGV[i + 5], at .. 'why', ARGV[i + 6])
      member_left(at, before[1] or '', state)
      if state == 'unknown' and before[1] ~= 'unknown' then
        emit('JobUnknown', 'node', node, 'job', job, 'reason', ARGV[i + 6])
      end
      if ARGV[i + 5] == '1' and before[2] ~= '1' then
        emit('JobUnheld', 'node', node, 'job', job, 'device_bytes', ARGV[i + 3])
      end
    end
    if state ~= (before[1] or '') then
      set('changed_ms', now)
      if state == 'gone' and before[1] then -- of a job that was never here there is nothing to tell
        emit('JobGone', 'node', node, 'job', job)
      end
    end
    if state == 'faulted' or not (S.lease_id ~= '' and S.job == job) then
      job_recompute(job)
    end
  end
end
local dead, done = {}, {}
local function has_died(record, job)
  local whose = dead[record.pid .. '/' .. record.start]
  return whose and (record.host == node or (whose == job and answers_for(node, record.host)))
end

for i = 6 + count * 7, #ARGV, 3 do
  local job, pid, start = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  dead[pid .. '/' .. start] = job
  local field = registered_as(job, node, pid, start)
  if field then
    done[#done + 1] = field
  end
  if S.lease_id ~= '' and S.gang == '' and S.job == job and answers_for(node, S.host) and S.pid == pid and S.start == start then
    reclaim('its process ended')
  end
end
for _, field in ipairs(done) do -- after the turns that ended by that: these processes were on record
  redis.call('HDEL', targets_key, field)
  set('changed_ms', now)
end
for _, member in ipairs(next(dead) and redis.call('ZRANGE', alive_key, 0, -1) or {}) do
  local gang, rank = party_alive(member)
  local party = gang and party_get(gang, rank) -- none: its gang ended a moment ago
  if party and has_died(party, gang == S.lease_id and S.job or redis.call('HGET', waiters_key, gang .. '/job')) then
    gang_end(gang, rank, party_named(gang, rank) .. ' ended')
  end
end
for _, waiter in ipairs(next(dead) and redis.call('ZRANGE', queue_key, 0, -1) or {}) do
  local record = waiter_get(waiter)
  if record.world == '' and has_died(record, record.job) then
    emit('WaiterReaped', 'waiter', waiter, 'job', record.job)
    waiter_remove(waiter)
  end
end
reap()
advance()
save()
return { 'ok', S.counter, ignored }
