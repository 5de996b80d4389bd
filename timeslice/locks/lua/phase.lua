--[[
Notes what a job does off the devices, or what it measured in a hold. Nothing is granted or moved by it.
ARGV  1 floor  2 id of the phase or measure  3 kind: began | ended | measured  4 job  5 phase  6 host  7 pid
      8 seconds, or ''  9 bytes, or ''  10 token of the hold, or ''  11 outcome: ok, or the name of an error
Reply ok | unknown   (unknown: nobody declared or serves the group; nothing was noted)
Events PhaseBegan, PhaseEnded, PhaseMeasured
--]]
-- @include group waiters
local id, kind, job, phase = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local message = id .. '/' .. kind
local NEWS_KEEP_MS = 30000 -- repeats come sooner

begin(false, FIELD_MAX)
if S.mode == '' then
  return { 'unknown' }
end
if has_ended(message) then
  return { 'ok' }
end
settle_clock()
remember_ended(message)
-- Where there are too many of them, what is told often and matters little makes room first.
redis.call('ZADD', ended_key, now - ENDED_KEEP_MS + NEWS_KEEP_MS, message)
if kind == 'began' then
  emit('PhaseBegan', 'job', job, 'phase', phase, 'host', ARGV[6], 'pid', ARGV[7])
  if redis.call('HEXISTS', jobs_key, job .. '/residency') == 1 then
    redis.call('HSET', jobs_key, job .. '/phase', phase, job .. '/phase_since_ms', digits(now), job .. '/phase_id', id)
  end
elseif kind == 'ended' then
  emit('PhaseEnded', 'job', job, 'phase', phase, 'host', ARGV[6], 'pid', ARGV[7], 'seconds', ARGV[8], 'outcome', ARGV[11])
  if redis.call('HGET', jobs_key, job .. '/phase_id') == id then
    redis.call('HDEL', jobs_key, job .. '/phase', job .. '/phase_since_ms', job .. '/phase_id')
  end
else
  local amounts = {}
  for name, amount in pairs({ seconds = ARGV[8], bytes = ARGV[9] }) do
    if amount ~= '' then
      amounts[#amounts + 1] = name
      amounts[#amounts + 1] = amount
    end
  end
  emit('PhaseMeasured', 'job', job, 'token', ARGV[10], 'label', phase, unpack(amounts))
end
save()
return { 'ok' }
