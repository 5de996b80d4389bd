--[[
Withdraws a waiter. If its grant had landed, the grant is passed on. A rank that withdraws ends its gang for all ranks.
ARGV  1 floor  2 waiter, or the id of a rank  3 who: 'client' (its own, no body runs) or the name of an operator
      4 why a rank gives up, or ''
Reply ok queued | ok granted | ok unknown | holds
Events WaiterCancelled, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local waiter, who, why = ARGV[2], ARGV[3], ARGV[4]
local operator = who ~= 'client'

-- Other ranks may be inside already: then what they did to the device must be proved out, as after a holder's death.
local function give_up(gang, rank)
  local world = redis.call('HGET', waiters_key, gang .. '/world')
  local forms = world and not redis.call('ZSCORE', queue_key, gang)
  gang_end(gang, rank, party_named(gang, rank) .. ' gave up' .. (why == '' and '' or ': ' .. why)
    .. (forms and '; ' .. ranks_missing(gang, world_of(world)) or ''))
end

begin(true, FIELD_MAX)
if operator and S.lease_id == waiter and S.confirmed == '1' then
  return { 'holds' }
end
settle_clock()
local was = 'unknown'
local gang, rank = string.match(redis.call('HGET', waiters_key, waiter .. '/gang') or '', '^(%S+) (%d+)$')
if gang then
  was = S.lease_id == gang and 'granted' or 'queued'
  give_up(gang, rank)
elseif S.lease_id == waiter then
  was = 'granted'
  end_unused('WaiterCancelled', 'by', who)
elseif redis.call('ZSCORE', queue_key, waiter) or redis.call('HEXISTS', waiters_key, waiter .. '/world') == 1 then
  was = 'queued'
  emit('WaiterCancelled', 'job', redis.call('HGET', waiters_key, waiter .. '/job') or '', 'waiter', waiter, 'by', who)
end
waiter_drop(waiter)
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
