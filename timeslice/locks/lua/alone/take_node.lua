--[[
Takes or renews the instance lease of a node, and writes the node's record. Refused while another instance's runs.
KEYS  1 record of the node  2 its command stream
ARGV  1 instance  2 lease_ms  3 keep_s, then field, value ...
Reply ok | taken field value ...
--]]
local lease_ms = tonumber(ARGV[2])
local stamp = redis.call('TIME')
local now = stamp[1] * 1000 + math.floor(stamp[2] / 1000)
local lease = redis.call('HMGET', KEYS[1], 'instance', 'instance_until_ms')
local left_ms = (tonumber(lease[2] or 0) or 0) - now

-- A lease far in the future was written before the clock stepped back.
if lease[1] ~= ARGV[1] and left_ms > 0 and left_ms <= 2 * lease_ms then
  local reply = redis.call('HGETALL', KEYS[1])
  table.insert(reply, 1, 'taken')
  return reply
end
redis.call('HDEL', KEYS[1], '_') -- a delete first, so that a full server does not refuse the rest
redis.call(
  'HSET', KEYS[1], 'heartbeat_at_ms', string.format('%.0f', now), 'instance', ARGV[1],
  'instance_until_ms', string.format('%.0f', now + lease_ms), unpack(ARGV, 4)
)
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3]) -- orders to a node that is silent for so long are void
return { 'ok' }
