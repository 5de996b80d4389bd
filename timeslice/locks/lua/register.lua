--[[
Notes a process of a job as a target for the agent of its node. Repeating it changes nothing.
ARGV  1 floor  2 job  3 host  4 pid  5 record (opaque here; agents validate it)
Reply ok | not_served
--]]
-- @include group
local field = ARGV[2] .. '/' .. ARGV[3] .. '/' .. ARGV[4]

begin()
if not redis.call('ZSCORE', nodes_key, ARGV[3]) then
  return { 'not_served' }
end
settle_clock()
redis.call('HSET', targets_key, field, ARGV[5])
save()
return { 'ok' }
