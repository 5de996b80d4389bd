--[[
Has a waiter look again at once: somebody found that it waits in a circle.
ARGV  1 floor  2 waiter
Reply ok | unknown (it waits no longer)
--]]
-- @include group
local key = grant_prefix .. ARGV[2]

begin(true, FIELD_MAX)
if not redis.call('ZSCORE', queue_key, ARGV[2]) then
  return { 'unknown' }
end
settle_clock()
save()
redis.call('XADD', key, 'MAXLEN', 8, '*', 'kind', 'poke')
redis.call('EXPIRE', key, GRANT_KEEP_S)
return { 'ok' }
