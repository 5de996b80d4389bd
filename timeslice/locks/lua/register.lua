--[[
Notes a process of a job as a target for the agent of its node. Repeating it changes nothing.
ARGV  1 floor  2 job  3 host  4 pid  5 record (opaque here; agents validate it)
Reply ok | not_served node ... (some of those that serve the group) | refused why
--]]
-- @include group
begin(false, BODY_MAX)
local field = target_field(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
if not redis.call('ZSCORE', nodes_key, ARGV[3]) then
  return { 'not_served', unpack(redis.call('ZRANGE', nodes_key, 0, 4)) }
end
if #field > FIELD_MAX or #ARGV[5] > RECORD_MAX then
  return { 'refused', 'its record is too long' }
end
if redis.call('HEXISTS', targets_key, field) == 0 and redis.call('HLEN', targets_key) >= TARGETS_MAX then
  return { 'refused', TARGETS_MAX .. ' processes are registered already' }
end
settle_clock()
redis.call('HSET', targets_key, field, ARGV[5])
save()
return { 'ok' }
