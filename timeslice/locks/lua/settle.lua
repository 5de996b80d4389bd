--[[
Ends a swap that was refused or undone, all states known: its waiter is put off, the group goes on. Without a waiter it
is an operator's order that is put off, or dropped if it was to be tried once.
ARGV  1 floor  2 swap  3 epoch  4 reason ('silent': the waiter gave no sign of life)  5 put off for ms
Reply ok | stale counter | open node
Events SwapDeferred, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
begin(true)
if S.closed == 'settled ' .. ARGV[2] and S.owner_epoch == tonumber(ARGV[3]) then
  return { 'ok' } -- asked again
end
if not is_swap(ARGV[2], ARGV[3]) then
  return { 'stale', S.counter }
end
local FINAL = { failed = true, ['rolled back'] = true }
for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
  local at = node .. '/@/'
  local seen = redis.call('HMGET', members_key, at .. 'swap', at .. 'step')
  if seen[1] == ARGV[2] and not FINAL[seen[2]] then
    return { 'open', node }
  end
end
settle_clock()
local waiter = S.swap_waiter
emit('SwapDeferred', 'swap', ARGV[2], 'job', S.swap_job, 'waiter', waiter, 'reason', ARGV[4])
clear_swap()
set('closed', 'settled ' .. ARGV[2])
if waiter ~= '' and redis.call('ZSCORE', queue_key, waiter) then
  redis.call('HSET', waiters_key, waiter .. '/deferred', ARGV[4], waiter .. '/deferred_at_ms', digits(now),
    waiter .. '/deferred_until_ms', digits(now + math.min(tonumber(ARGV[5]), MAX_PAUSE_MS)))
elseif waiter == '' and S.evict_how == 'once' then
  end_eviction(ARGV[4])
elseif waiter == '' then
  set('evict_reason', ARGV[4])
  set('evict_tried_ms', now)
  set('evict_until_ms', now + math.min(tonumber(ARGV[5]), MAX_PAUSE_MS))
end
reap()
advance()
save()
return { 'ok' }
