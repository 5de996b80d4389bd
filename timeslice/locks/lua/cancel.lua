--[[
Withdraws a waiter. If its grant had landed, the grant is passed on.
ARGV  1 floor  2 waiter  3 who: 'client' (its own, no body runs) or the name of an operator
Reply ok queued | ok granted | ok unknown | holds
Events WaiterCancelled, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local waiter, who = ARGV[2], ARGV[3]
local operator = who ~= 'client'

begin(true, FIELD_MAX)
if operator and S.lease_id == waiter and S.confirmed == '1' then
  return { 'holds' }
end
settle_clock()
local was = 'unknown'
if S.lease_id == waiter then
  was = 'granted'
  end_lease('WaiterCancelled', 'by', who)
elseif redis.call('ZSCORE', queue_key, waiter) then
  was = 'queued'
  emit('WaiterCancelled', 'job', redis.call('HGET', waiters_key, waiter .. '/job') or '', 'waiter', waiter, 'by', who)
end
waiter_remove(waiter)
remember_ended(waiter)
local key = grant_prefix .. waiter
if not operator then
  redis.call('DEL', key)
elseif was ~= 'unknown' then
  redis.call('XADD', key, '*', 'kind', 'cancelled', 'by', who)
  redis.call('EXPIRE', key, GRANT_KEEP_S)
end
reap()
advance()
save()
return { 'ok', was }
