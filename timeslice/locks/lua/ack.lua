--[[
An agent reports a step of a swap: what it observed of each job, and how far the node is. Only while the node is in the
middle of this command: an old ack that arrives late must not undo what was seen since.
ARGV  1 floor  2 node  3 swap  4 command id
      5 outcome: '' (in the middle) | prepared | done | failed | rolled back
      6 kind of fault  7 error text  then per job: job state bytes(host) device_bytes backend
      discarded (1: its content was dropped, not kept, by this suspend or before this restore)
      saved (bytes that this step did not have to copy)
      why (of a state `unknown`: why nobody can see it)
Reply ok counter | stale counter   (stale: nothing was noted)
Events JobSuspended, JobRestored, JobGone, JobUnknown, StepFailed
--]]
-- @include group residency
local node, swap, command, outcome = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local this = node .. '/@/'
local EVENTS = { suspended = 'JobSuspended', resident = 'JobRestored', gone = 'JobGone' }

begin(true)
local current = redis.call('HMGET', members_key, this .. 'command', this .. 'step')
if current[1] ~= command then
  return { 'stale', S.counter }
end
settle_clock()
if string.sub(current[2], 1, 5) == 'begun' then
  for i = 8, #ARGV, 8 do
    local job, state, at = ARGV[i], ARGV[i + 1], node .. '/' .. ARGV[i] .. '/'
    local before = redis.call('HGET', members_key, at .. 'state') or ''
    if state == 'gone' or state == 'absent' then
      member_forget(at)
    else
      redis.call('HSET', members_key, at .. 'state', state, at .. 'bytes', ARGV[i + 2], at .. 'device_bytes',
        ARGV[i + 3], at .. 'backend', ARGV[i + 4], at .. 'why', ARGV[i + 7])
      member_left(at, before, state)
      if state ~= before then
        redis.call('HSET', members_key, at .. 'saved', ARGV[i + 6])
      end
      if OUT[state] then -- be it that a part of it stayed: it can't run
        redis.call('HDEL', members_key, at .. 'unheld')
      end
    end
    if state ~= before and EVENTS[state] then
      emit(EVENTS[state], 'node', node, 'job', job, 'bytes', ARGV[i + 2], 'saved', ARGV[i + 6], 'swap', swap)
    end
    if state == 'unknown' and before ~= 'unknown' then
      emit('JobUnknown', 'node', node, 'job', job, 'reason', ARGV[i + 7])
    end
    if job_recompute(job) then
      redis.call('HSET', jobs_key, job .. '/moved', digits(draw())) -- what was seen before this is old
      if ARGV[i + 5] == '1' then
        redis.call('HSET', jobs_key, job .. '/needs_weights', '1') -- until a weight sync has ended well
      end
    end
  end
  if outcome ~= '' then
    redis.call('HSET', members_key, this .. 'step', outcome, this .. 'kind', ARGV[6], this .. 'error', ARGV[7])
    if outcome == 'failed' then
      emit('StepFailed', 'node', node, 'swap', swap, 'kind', ARGV[6], 'error', ARGV[7])
    end
    wake('ack')
  end
end
save()
return { 'ok', S.counter }
