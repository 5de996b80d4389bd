--[[
An agent reports a step of a swap: what it observed of each job, and how far the node is.
ARGV  1 floor  2 node  3 swap  4 command id
      5 outcome: '' (in the middle) | prepared | done | failed | rolled back
      6 kind of fault  7 error text  then per job: job state bytes(host) device_bytes backend
Reply ok counter | stale counter   (states are noted either way)
Events JobSuspended, JobRestored, JobGone, StepFailed
--]]
-- @include group waiters residency lease advance
local node, swap, command, outcome = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local EVENTS = { suspended = 'JobSuspended', resident = 'JobRestored', gone = 'JobGone' }

begin(true)
local current = S.swap_id == swap and swap ~= 0
settle_clock()
for i = 8, #ARGV, 5 do
  local job, state, at = ARGV[i], ARGV[i + 1], node .. '/' .. ARGV[i] .. '/'
  local before = redis.call('HGET', members_key, at .. 'state') or ''
  if state == 'gone' or state == 'absent' then
    redis.call('HDEL', members_key, at .. 'state', at .. 'bytes', at .. 'device_bytes', at .. 'backend', at .. 'unheld')
  else
    redis.call('HSET', members_key, at .. 'state', state, at .. 'bytes', ARGV[i + 2], at .. 'device_bytes', ARGV[i + 3],
      at .. 'backend', ARGV[i + 4])
  end
  if state ~= before and EVENTS[state] then
    emit(EVENTS[state], 'node', node, 'job', job, 'bytes', ARGV[i + 2], 'swap', ARGV[3])
  end
  if not (S.lease_id ~= '' and S.job == job) then
    job_recompute(job)
  end
end
if outcome ~= '' and current then
  local at = node .. '/@/'
  if redis.call('HGET', members_key, at .. 'command') == command then
    redis.call('HSET', members_key, at .. 'step', outcome, at .. 'kind', ARGV[6], at .. 'error', ARGV[7])
    if outcome == 'failed' then
      emit('StepFailed', 'node', node, 'swap', ARGV[3], 'kind', ARGV[6], 'error', ARGV[7])
    end
  end
  wake('ack')
end
if not current then
  set('changed_ms', now)
  advance()
end
save()
return { current and 'ok' or 'stale', S.counter }
