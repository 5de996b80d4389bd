--[[
Asks the waiter of an unplanned swap for a sign of life, unless it gave one in the last second.
Its refresh wakes the inbox.
ARGV  1 floor  2 swap  3 epoch
Reply ok ms_since_seen | stale counter
--]]
-- @include group waiters
begin(true)
if not is_swap(ARGV[2], ARGV[3]) or S.swap_step ~= 'new' then
  return { 'stale', S.counter }
end
settle_clock()
save()
local waiter = S.swap_waiter
local ttl = tonumber(redis.call('HGET', waiters_key, waiter .. '/ttl_ms') or WAITER_TTL_MS)
local seen = now - (tonumber(redis.call('ZSCORE', alive_key, waiter) or 0) - ttl)
if seen > 1000 then
  local key = grant_prefix .. waiter
  redis.call('XADD', key, 'MAXLEN', 8, '*', 'kind', 'poke', 'swap', ARGV[2])
  redis.call('EXPIRE', key, GRANT_KEEP_S)
end
return { 'ok', seen }
