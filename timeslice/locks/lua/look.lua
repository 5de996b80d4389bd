--[[
Reads the group as one picture. It writes nothing, and so works on a full server, where a MULTI would not.
ARGV  1 floor (of no use here)
Reply ok time state queue waiters alive jobs members nodes config targets   (hashes and scores as flat lists)
--]]
-- @include group
-- Registrations are the one thing here that clients word themselves: one that is too long is not handed out to others.
local all, targets = redis.call('HGETALL', targets_key), {}
for i = 1, #all, 2 do
  if #all[i] <= FIELD_MAX and #all[i + 1] <= RECORD_MAX and #targets < 2 * TARGETS_MAX then
    targets[#targets + 1] = all[i]
    targets[#targets + 1] = all[i + 1]
  end
end
return {
  'ok', redis.call('TIME'), redis.call('HGETALL', state_key), redis.call('ZRANGE', queue_key, 0, -1),
  redis.call('HGETALL', waiters_key), redis.call('ZRANGE', alive_key, 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', jobs_key), redis.call('HGETALL', members_key),
  redis.call('ZRANGE', nodes_key, 0, -1, 'WITHSCORES'), redis.call('HGETALL', config_key),
  targets,
}
