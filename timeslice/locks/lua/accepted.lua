--[[
The agent's question before it touches anything: is this order still the group's?
ARGV  1 floor  2 node  3 swap  4 epoch  5 step (prepare | commit | rollback)  6 command id
Reply ok ms_left counter | stale counter | late counter
--]]
-- @include group
local node, swap, epoch, step, command = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]

begin(true)
if S.swap_id ~= swap or S.owner_epoch ~= epoch or S.swap_step ~= step or floor > S.counter then
  return { 'stale', S.counter }
end
settle_clock()
local left = S.swap_deadline_ms - now
local at = node .. '/@/'
local repeated = redis.call('HGET', members_key, at .. 'command') == command
if left <= 0 and not repeated then
  save()
  return { 'late', S.counter }
end
if not repeated then
  redis.call('HSET', members_key, at .. 'swap', ARGV[3], at .. 'step', 'begun ' .. step, at .. 'command', command,
    at .. 'error', '', at .. 'kind', '')
end
save()
return { 'ok', math.max(left, 0), S.counter }
