--[[
Reads the group as one picture. It writes nothing, and so works on a full server, where a MULTI would not.
ARGV  1 floor (of no use here)
Reply ok time state queue waiters alive jobs members nodes config targets   (hashes and scores as flat lists)
--]]
-- @include group
return {
  'ok', redis.call('TIME'), redis.call('HGETALL', state_key), redis.call('ZRANGE', queue_key, 0, -1),
  redis.call('HGETALL', waiters_key), redis.call('ZRANGE', alive_key, 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', jobs_key), redis.call('HGETALL', members_key),
  redis.call('ZRANGE', nodes_key, 0, -1, 'WITHSCORES'), redis.call('HGETALL', config_key),
  redis.call('HGETALL', targets_key),
}
