--[[
A node leaves the group: its agent, which moved nothing, or an operator who knows that the node is gone.
ARGV  1 floor  2 node  3 who: 'agent', or the name of an operator
Reply ok | stays (it is silent now, and is waited for: job state is on it) | unknown
Events NodeLeft, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local node, by_agent = ARGV[2], ARGV[3] == 'agent'

begin(true)
if not redis.call('ZSCORE', nodes_key, node) then
  return { 'unknown' }
end
settle_clock()
local jobs, fields = {}, {}
local flat = redis.call('HGETALL', members_key)
for i = 1, #flat, 2 do
  local owner, job = string.match(flat[i], '^([^/]+)/([^/]+)/')
  if owner == node then
    fields[#fields + 1] = flat[i]
    if job ~= '@' then
      jobs[job] = true
    end
  end
end
local stays = by_agent and next(jobs) ~= nil
if stays then
  -- Nobody else can vouch for what is on it: until the agent returns the group treats it as out of reach.
  redis.call('ZADD', nodes_key, now - 1, node)
else
  hear(node)
  redis.call('ZREM', nodes_key, node)
  for _, field in ipairs(fields) do
    redis.call('HDEL', members_key, field)
  end
  for _, field in ipairs(redis.call('HKEYS', targets_key)) do
    if string.match(field, '^[^/]+/([^/]+)/') == node then
      redis.call('HDEL', targets_key, field)
    end
  end
  for job in pairs(jobs) do
    if job ~= S.job then
      job_recompute(job)
    end
  end
  emit('NodeLeft', 'node', node, 'by', ARGV[3])
end
set('changed_ms', now)
wake('members')
reap()
advance()
save()
return { stays and 'stays' or 'ok' }
