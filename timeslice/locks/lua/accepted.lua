--[[
The agent's question before it touches anything: is this order still the group's? One that the node has begun is, for
as long as its step lasts.
ARGV  1 floor  2 node  3 swap  4 epoch  5 step (prepare | commit | rollback)  6 command id
Reply ok ms_left counter | stale counter | late counter
--]]
-- @include group
local node, step, command = ARGV[2], ARGV[5], ARGV[6]

begin(true)
local at = node .. '/@/'
local repeated = redis.call('HGET', members_key, at .. 'command') == command
-- What the node has begun it may finish after a crash, whoever owns the group by then: a new owner waits for its report,
-- and carries out the same plan.
local owner = repeated and digits(S.owner_epoch) or ARGV[4]
-- A node that was taken out of the group is not waited for, so it must not begin anything either.
if not is_swap(ARGV[3], owner) or S.swap_step ~= step or floor > S.counter
  or not redis.call('ZSCORE', nodes_key, node) then
  return { 'stale', S.counter }
end
settle_clock()
local left = S.swap_deadline_ms - now
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
