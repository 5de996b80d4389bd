--[[
Ends the instance lease of a node, if it is the caller's, so that another agent may have the node at once.
KEYS  1 record of the node  2 its command stream
ARGV  1 instance  2 '1' if the node serves no group any more: then nothing of it is kept
Reply ok | other (the node is another instance's)
--]]
local instance = redis.call('HGET', KEYS[1], 'instance')
if instance and instance ~= ARGV[1] then
  return { 'other' }
end
if ARGV[2] == '1' then
  redis.call('DEL', KEYS[1], KEYS[2])
elseif instance then
  redis.call('HSET', KEYS[1], 'instance_until_ms', '0')
end
return { 'ok' }
